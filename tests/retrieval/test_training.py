"""Training of routers: it learns what can be learnt, chooses on the slice, and repeats."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.config import UserError
from molora_jax.retrieval import chain, losses, mara, training
from molora_jax.retrieval.mara import MaraConfig
from molora_jax.retrieval.slates import Slate, collate
from molora_jax.retrieval.training import TrainingConfig
from tests.numerics import assert_close

D = 6
CFG = MaraConfig(encoding=D, width=16, pooling="mean", mixer="transformer", layers=1, slots=0)
PLAIN = dataclasses.replace(CFG, mixer="mlp", layers=0)
LINKED = dataclasses.replace(CFG, mixer="mlp", chained=True, channels=1, links=1)
FAST = TrainingConfig(passes=1, epochs=6, rows=8, rate=3e-2, held=0.2)


def slate(number: int, *, linked: bool = False) -> Slate:
    """Evidence is marked by a feature; or its first piece by a channel, and its second by a link from the first."""
    rng = np.random.default_rng(number)
    count = int(rng.integers(4, 8))
    encodings, gold = rng.normal(size=(count, D)).astype(np.float32), np.zeros(count, bool)
    first, second = rng.permutation(count)[:2]
    gold[[first, second]] = True
    channels, links = np.zeros((count, int(linked)), np.float32), np.zeros((count, count, int(linked)), np.float32)
    if linked:
        channels[first], links[first, second] = 1, 1
        decoy = next(i for i in range(count) if i not in (first, second))
        links[decoy, (decoy + 1) % count] = 1
    else:
        encodings[:, 2] = 3.0 * gold + 1e3  # far from 0, so that only a standardised feature is easy to read
    return Slate(f"q{number}", gold, encodings, channels, links)


def test_a_router_learns_a_feature_far_from_zero():
    slates = [slate(i) for i in range(80)]
    cfg = dataclasses.replace(CFG, standard=True)
    found = training.train(cfg, slates, FAST)
    assert found.score == 1.0
    fresh = [slate(1000 + i) for i in range(40)]
    assert training.quality(training.chains(cfg, found.params, fresh, passes=1), fresh) > 0.95
    untrained = training.chains(CFG, mara.init(CFG), fresh, passes=1)
    assert training.quality(untrained, fresh) < 0.8


def test_a_chain_follows_links_that_one_pass_cannot():
    slates, fresh = ([slate(start + i, linked=True) for i in range(80)] for start in (0, 1000))
    chained = training.train(LINKED, slates, dataclasses.replace(FAST, passes=2))
    assert training.quality(training.chains(LINKED, chained.params, fresh, passes=2), fresh) > 0.97
    alone = training.train(LINKED, slates, FAST)
    assert training.quality(training.chains(LINKED, alone.params, fresh, passes=1), fresh) < 0.9


def test_runs_repeat_and_seeds_differ():
    slates = [slate(i) for i in range(40)]
    config = dataclasses.replace(FAST, epochs=2, dropout=0.2)
    one, same, other = (training.train(PLAIN, slates, c) for c in (config, config, dataclasses.replace(config, seed=1)))
    for a, b in zip(*map(jax.tree.leaves, (one.params, same.params)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert one.score == same.score
    assert {s.id for s in one.held} == {s.id for s in same.held} != {s.id for s in other.held}
    assert len(one.held) == 8


def test_what_is_held_out_trains_nothing():
    """The slates of one question never part, and another gold in the slice changes no parameter but the choice."""
    slates = [slate(i // 2) for i in range(60)]
    learning, held = training.split(slates, FAST)
    assert not {s.id for s in learning} & {s.id for s in held}
    assert len(learning) + len(held) == 60
    ids = {s.id for s in held}
    flipped = [dataclasses.replace(s, gold=~s.gold) if s.id in ids else s for s in slates]
    one, other = (training.train(PLAIN, own, dataclasses.replace(FAST, epochs=1)) for own in (slates, flipped))
    for a, b in zip(*map(jax.tree.leaves, (one.params, other.params)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_frozen_shifts_stay_and_the_rest_moves():
    slates = [slate(i) for i in range(40)]
    cfg = dataclasses.replace(PLAIN, standard=True)
    found = training.train(cfg, slates, dataclasses.replace(FAST, epochs=1))
    learning, _ = training.split(slates, FAST)
    every = np.concatenate([s.encodings for s in learning]).astype(np.float64)
    assert_close(np.asarray(found.params["standard"]["shift"]), every.mean(0), dtype="bfloat16")
    np.testing.assert_allclose(1 / found.params["standard"]["scale"], every.std(0), rtol=1e-2)
    assert not np.array_equal(found.params["proj"], mara.init(cfg)["proj"])


def test_a_permutation_moves_all_of_a_question_together():
    batch = collate([slate(i, linked=True) for i in range(5)], 9)
    moved = training.permuted(batch, jax.random.key(3))
    params = mara.init(LINKED)
    params["channels"]["direct"], params["links"]["direct"] = jnp.ones(1), jnp.ones(1)
    score = lambda b: chain.embedded(LINKED, params, b.encodings, b.valid, passes=2, channels=b.channels, links=b.links)
    (was, picks), (now, later) = score(batch), score(moved)
    loss = lambda s, a, b: losses.chain(
        losses.LossConfig(), [jax.tree.map(lambda x: x[1], s)], a[:, :0], b.gold, b.valid
    )
    assert_close(loss(now, later, moved)[0], loss(was, picks, batch)[0], "model")
    assert not np.array_equal(moved.gold, batch.gold)
    np.testing.assert_array_equal(np.sort(now.local, axis=-1) > -np.inf, np.sort(was.local, axis=-1) > -np.inf)


def test_tokens_are_pooled_by_the_router():
    rng = np.random.default_rng(0)
    tokens = [tuple(rng.normal(size=(n, D)).astype(np.float32) for n in (3, 1, 5)) for _ in range(20)]
    none = np.zeros((3, 0)), np.zeros((3, 3, 0))
    slates = [Slate(str(i), np.array([True, False, False]), own, *none) for i, own in enumerate(tokens)]
    cfg = dataclasses.replace(PLAIN, pooling="attention", pool_width=4)
    found = training.train(cfg, slates, dataclasses.replace(FAST, epochs=1))
    got = training.chains(cfg, found.params, slates, passes=1)
    for own, one in zip(tokens, got, strict=True):
        each = jnp.stack([mara.pool(cfg, found.params, h, jnp.ones(len(h), bool)) for h in own])
        assert_close(one.scores, mara.score(cfg, found.params, each[None]).local[0], "model", "float32")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (dict(passes=2), "without anchors"),
        (dict(rows=100), "for batches of 100"),
    ],
)
def test_what_cannot_be_trained(config, said):
    with pytest.raises(UserError, match=said):
        training.train(CFG, [slate(i) for i in range(20)], dataclasses.replace(FAST, **config))


def test_settings_that_cannot_be():
    with pytest.raises(UserError, match="at least one pass"):
        TrainingConfig(passes=0)
    with pytest.raises(UserError, match="at most 4"):
        collate([slate(i) for i in range(9)], 4)
