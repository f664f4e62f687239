"""Who runs, on numpy and on jnp alike, and thresholds that can always be reached."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molora_jax.engine import policy

LISTS = st.integers(1, 4).flatmap(
    lambda size: st.tuples(
        st.lists(st.integers(0, 9), min_size=size, max_size=size),
        st.lists(st.sampled_from([0.0, 0.5, 2.0, 7.0]), min_size=size, max_size=size),
        st.lists(st.integers(1, 9), min_size=size, max_size=size),
    )
)


@functools.cache
def jitted(name: str):
    return jax.jit(getattr(policy, name))


def both(name: str, *args):
    """The answer on numpy, after the traced one has been found equal."""
    want = getattr(policy, name)(*args)
    narrow = [jnp.asarray(a, jnp.float32 if np.asarray(a).dtype.kind == "f" else jnp.int32) for a in args]
    np.testing.assert_array_equal(jitted(name)(*narrow), want)
    return want


@given(LISTS, st.sampled_from([0.5, 2.0, np.inf]))
def test_pick_follows_its_rules(lists, max_wait):
    waiting, oldest, thresholds = (np.array(x) for x in lists)
    got = int(both("pick", waiting, oldest, thresholds, max_wait))
    some = [i for i in range(len(waiting)) if waiting[i]]
    if not some:
        assert got == policy.IDLE
        return
    assert got in some  # nobody runs for nobody
    late = [i for i in some if oldest[i] >= max_wait]
    full = [i for i in some if waiting[i] >= thresholds[i]]
    if late:
        assert oldest[got] == max(oldest[late])
        assert got in late
    elif full:
        assert got == max(full)
    else:
        assert waiting[got] / thresholds[got] == max(waiting[i] / thresholds[i] for i in some)


@given(LISTS, st.sampled_from([0.5, 2.0, np.inf]), st.data())
def test_ready(lists, max_wait, data):
    waiting, oldest, thresholds = (np.array(x) for x in lists)
    i = data.draw(st.integers(0, len(waiting) - 1))
    want = waiting[i] > 0 and (waiting[i] >= thresholds[i] or oldest[i] >= max_wait)
    for xp in (np, jnp):
        got = policy.ready(i, xp.asarray(waiting), xp.asarray(oldest), xp.asarray(thresholds), max_wait)
        assert bool(got) == want


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 50))
def test_clamped_thresholds_can_be_reached(thresholds, active):
    given_ = np.array(thresholds)
    got = both("clamp", given_, np.asarray(active))
    assert (got >= 1).all()
    assert (got <= given_).all()
    assert (got - 1).sum() < max(active, 1)
    if (given_ - 1).sum() < active:
        assert (got == given_).all()


@pytest.mark.parametrize(
    ("thresholds", "active", "want"),
    [([1, 9], 16, [1, 9]), ([1, 9], 4, [1, 4]), ([4, 9], 6, [2, 4]), ([3, 3], 1, [1, 1]), ([5], 0, [1])],
)
def test_clamp(thresholds, active, want):
    assert policy.clamp(np.array(thresholds), active).tolist() == want


@given(st.lists(st.sampled_from([0.5, 1.0, 1.5, 4.0, np.inf]), min_size=1, max_size=9))
def test_rows_are_those_served_the_quickest(seconds):
    got = int(both("rows", np.array(seconds)))
    rates = [count / cost for count, cost in enumerate(seconds, 1)]
    assert got == max(count for count, rate in enumerate(rates, 1) if rate == max(rates))


def test_all_go_where_a_run_costs_the_same():
    assert policy.rows(np.array([1.0, 1.0, 1.0, np.inf])) == 3
    assert policy.rows(np.array([1.0, 1.0, 2.0, 4.0])) == 2
