"""What lets an engine run any program for all its requests at once, inside a loop on the device."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.routing.program import NAMES, check, knob_values
from tests.routing import catalogue

every = pytest.mark.parametrize("program", catalogue.PROGRAMS, ids=catalogue.name)
ROWS = 5


def shapes(tree):
    return jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), tree)


@every
def test_a_batch_is_its_rows_and_a_state_keeps_its_shape(program):
    """Two steps of five requests, each with knobs, state and model of its own; shapes are those of `init`."""
    params, rng = catalogue.params(program), np.random.default_rng(1)
    knobs = {key: value * jnp.linspace(0.5, 1.5, ROWS) for key, value in knob_values(program, {}).items()}

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0, 0, 0, 0))
    def run(params, knobs, key, models, signals):
        state = program.init(params, knobs, key)
        seen = []
        state, decision = program.start(params, knobs, state)
        for i in range(2):
            seen.append((state, decision))
            sig = jax.tree.map(lambda column, i=i: column[i], signals)
            state, decision = program.step(params, knobs, state, models[i], sig)
        return [*seen, (state, decision)]

    keys = jax.random.split(jax.random.key(0), ROWS)
    models = rng.integers(0, program.models, (ROWS, 2)).astype(np.int32)
    signals = [catalogue.signals(program, ROWS, rng) for _ in range(2)]
    signals = jax.tree.map(lambda *columns: jnp.stack(columns, axis=1), *signals)
    batch = run(params, knobs, keys, models, signals)
    assert shapes(batch[0]) == shapes(batch[1]) == shapes(batch[2])
    at = lambda tree, i: jax.tree.map(lambda leaf: leaf[i : i + 1], tree)
    for i in range(ROWS):
        one = run(params, at(knobs, i), keys[i : i + 1], models[i : i + 1], at(signals, i))
        jax.tree.map(np.testing.assert_array_equal, one, at(batch, i))


@every
def test_a_program_is_static_and_consistent(program):
    check(program)
    twin = type(program)(**{field: getattr(program, field) for field in program.__dataclass_fields__})
    assert program == twin
    assert hash(program) == hash(twin)
    assert program.signals <= NAMES


@every
def test_a_program_is_short(program):
    path = inspect.getsourcefile(type(program))
    with open(path) as file:
        assert len(file.readlines()) <= 60
