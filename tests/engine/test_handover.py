"""What travels between subservers' tables."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.engine.handover import Standing, columns, cut, known, receive, rolled, unrolled, window
from molora_jax.engine.journey import Departures
from molora_jax.engine.table import RequestTable, new_table
from molora_jax.routing.programs.speculative import Speculative

SLOTS, LENGTH, WIDTH = 3, 10, 4


def filled(seed: int) -> RequestTable:
    """A table between 2 models, all leaves random."""
    rng = np.random.default_rng(seed)
    departures = Departures(Speculative(), {}, length=LENGTH, vocab=5, dtype=np.dtype(np.float32), entropy=True)
    empty = new_table(SLOTS, LENGTH, models=2, experts=True, journey=departures.empty(SLOTS))
    table = jax.tree.map(lambda leaf: jnp.asarray(rng.integers(0, 100, leaf.shape)).astype(leaf.dtype), empty)
    turn = dataclasses.replace(table.journey.turn, model=jnp.array([0, 1, 1], jnp.int32))
    return dataclasses.replace(table, journey=dataclasses.replace(table.journey, turn=turn))


@pytest.mark.parametrize("counts", [(4, 0), (3, 1), (0, 0)])
def test_a_receiver_gets_what_it_is_sent_and_nothing_else(counts):
    sender, receiver = filled(1), filled(2)
    slots, starts, counts = np.array([2, 0, -1]), np.array([5, 9, 0]), np.array([*counts, 0])
    rows = lambda leaf: np.asarray(leaf)[np.maximum(slots, 0)]
    shown = {name: np.array(value) for name, value in window(sender, jnp.array([9, 0, 5]), WIDTH).items()}
    given = {name: rows(value) for name, value in shown.items()}
    got = receive(receiver, slots, starts, counts, jax.tree.map(rows, Standing.of(sender)), given)
    for name, column in columns(receiver).items():
        want = np.array(column)
        for slot, start, count in zip(slots[:2], starts, counts, strict=False):
            want[slot, start : start + count] = columns(sender)[name][slot, start : start + count]
        np.testing.assert_array_equal(columns(got)[name], want)
    for mine, theirs, leaf in zip(*map(jax.tree.leaves, map(Standing.of, (receiver, sender, got))), strict=True):
        sent = np.array([True, False, True]).reshape(3, *[1] * (leaf.ndim - 1))
        np.testing.assert_array_equal(leaf, np.where(sent, theirs, mine))
    same = dict(limit=got.limit, stops=got.stops, sampling=got.sampling, knobs=got.journey.knobs)
    mine = dict(limit=receiver.limit, stops=receiver.stops, sampling=receiver.sampling, knobs=receiver.journey.knobs)
    jax.tree.map(np.testing.assert_array_equal, same, mine)


def test_a_receiver_knows_the_prompt_and_what_its_model_has_read():
    table = filled(0)
    table = dataclasses.replace(
        table,
        anchor=jnp.array([[7, 1], [1, 4], [9, 2]], jnp.int32),
        journey=dataclasses.replace(table.journey, prompt=jnp.array([3, 3, 3], jnp.int32)),
    )
    assert known(table).tolist() == [7, 4, 3]


def test_columns_are_cut_row_by_row():
    values = {"tokens": np.arange(12).reshape(2, 6)}
    got = cut(values, np.array([1, 4]), np.array([3, 2]))["tokens"]
    assert got[0].tolist() == [1, 2, 3]
    assert got[1, :2].tolist() == [10, 11]
    assert cut(values, np.array([0, 0]), np.array([0, 0]))["tokens"].shape == (2, 0)


@pytest.mark.parametrize(("length", "hold"), [(7, 4), (8, 1), (9, 3), (4, 0)])
def test_held_logits_come_back_to_their_places(length, hold):
    drafts = np.random.default_rng(0).normal(size=(4, 5))
    back = unrolled(rolled(drafts, length, hold), length, 4)
    places = [position % 4 for position in range(length - hold, length)]
    np.testing.assert_array_equal(back[places], drafts[places])
    np.testing.assert_array_equal(rolled(drafts, length, hold), drafts[places])
