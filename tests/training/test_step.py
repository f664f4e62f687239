"""One step: what trains, what stays, and how much each token and group counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.compilation import counted
from molora_jax.config import UserError
from molora_jax.training.objective import Sums
from molora_jax.training.optimiser import Group, OptimiserConfig, Schedule
from molora_jax.training.step import Trainer
from tests.numerics import assert_close
from tests.training import toy

ADAPTER = Group(name="adapter", paths=("adapter.*",), rate=0.1)
HEAD = Group(name="head", paths=("params.head.*",), rate=0.01, decay=0.5)


def config(*groups: Group, **kw) -> OptimiserConfig:
    return OptimiserConfig(groups=groups or (ADAPTER,), **kw)


def trainer(tree=None, *groups: Group, loss=toy.loss, **kw) -> Trainer:
    own = {key: kw.pop(key) for key in ("accumulate", "dtype", "seed") if key in kw}
    return Trainer(toy.tree() if tree is None else tree, loss, config(*groups, **kw), **own)


def run(made: Trainer, steps: int):
    state, losses = made.init(), []
    for i in range(steps):
        state, metrics = made.step(state, toy.rows(i % 2))
        losses.append(float(metrics["loss"]))
    return state, losses


def naive_gradient(tree, b) -> np.ndarray:
    """Of the mean loss in the adapter, in fp64 numpy."""
    wide = lambda leaf: np.asarray(leaf, np.float64)
    embed, head, add = (wide(tree["params"]["embed"]["weight"]), wide(tree["params"]["head"]["weight"]), None)
    add = wide(tree["adapter"]["add"])
    grad, total = np.zeros_like(add), 0.0
    tokens, weights = np.asarray(b.tokens), wide(b.weights)
    for row, w in zip(tokens, weights, strict=True):
        for t in range(len(row) - 1):
            scores = head @ (embed[row[t]] + add[row[t]])
            p = np.exp(scores - scores.max())
            p /= p.sum()
            p[row[t + 1]] -= 1
            grad[row[t]] += w[t + 1] * (p @ head)
            total += w[t + 1]
    return grad / total


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_the_first_step_is_adams_of_the_token_mean_however_the_batch_is_cut(accumulate):
    """Adam's first update is rate · g / (|g| + ε)."""
    with jax.enable_x64(True):
        tree, b = toy.tree(np.float64), toy.rows()
        made = trainer(tree, clip=None, accumulate=accumulate)
        state, metrics = made.step(made.init(), b)
        grad = naive_gradient(tree, b)
        assert_close(state.trained["adapter.add"], -float(np.float32(0.1)) * grad / (np.abs(grad) + 1e-8))
        assert_close(metrics["grad_norm"], np.linalg.norm(grad))
        assert_close(metrics["weight"], np.asarray(b.weights)[:, 1:].sum())


def test_only_what_trains_has_a_gradient_and_moments():
    made = trainer()
    state = made.init()
    assert set(state.trained) == {"adapter.add"}
    sizes = sorted(leaf.size for leaf in jax.tree.leaves(state.optimiser))
    assert sizes == [1, 1, 44, 44]
    assert set(made.frozen) == {"params.embed.weight", "params.head.weight", "adapter.slots"}


def test_what_is_frozen_stays_to_the_bit_and_what_came_in_stays_usable():
    tree = toy.tree()
    before = jax.tree.map(lambda leaf: np.array(leaf, copy=True), tree)
    made = trainer(tree)
    state, losses = run(made, 9)
    after = made.tree(state)
    jax.tree.map(np.testing.assert_array_equal, tree, before)
    assert losses[-1] < losses[0]
    assert np.abs(after["adapter"].pop("add")).max() > 0.1
    before["adapter"].pop("add")
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_each_group_has_its_own_rate_and_decay():
    tree, b = toy.tree(), toy.rows()
    made = trainer(tree, ADAPTER, HEAD, clip=None)
    state, _ = made.step(made.init(), b)
    moved = np.abs(np.asarray(state.trained["adapter.add"]))
    np.testing.assert_allclose(moved[moved > 0], 0.1, rtol=1e-3)
    old = np.asarray(tree["params"]["head"]["weight"])
    change = np.abs(np.asarray(state.trained["params.head.weight"]) - (1 - 0.01 * 0.5) * old)
    np.testing.assert_allclose(change, 0.01, rtol=1e-3)


def test_the_first_group_that_names_a_leaf_counts():
    every = Group(name="rest", paths=("*",), rate=1.0)
    cfg = config(HEAD, every)
    assert [cfg.group_of(path) for path in ("params.head.weight", "adapter.add")] == ["head", "rest"]


def test_everything_can_train():
    made = trainer(toy.tree(), Group(name="all", paths=("*",), rate=0.03))
    state, losses = run(made, 13)
    assert set(state.trained) == {"params.embed.weight", "params.head.weight", "adapter.add"}
    assert losses[-1] < losses[0]


def test_clipping_bounds_the_norm_over_all_groups():
    b = toy.rows()
    free = trainer(toy.tree(), ADAPTER, HEAD, clip=None)
    tight = trainer(toy.tree(), ADAPTER, HEAD, clip=0.01)
    states = [made.step(made.init(), b) for made in (free, tight)]
    norm = float(states[0][1]["grad_norm"])
    assert states[1][1]["grad_norm"] == norm > 0.01  # what is reported is what came in
    first = lambda state: [leaf for leaf in jax.tree.leaves(state[0].optimiser) if leaf.shape == (11, 4)]
    for loose, bound in list(zip(*map(first, states), strict=True))[:2]:
        assert_close(np.asarray(bound), np.asarray(loose) * (0.01 / norm))


def test_schedules_rise_and_fall():
    line = Schedule(shape="linear", steps=8, warmup=3, end=0.1)
    np.testing.assert_allclose([line(i) for i in range(4)], [0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose([line(i) for i in (5, 8, 20)], [0.64, 0.1, 0.1], rtol=1e-6)
    curve = Schedule(shape="cosine", steps=10)
    np.testing.assert_allclose([curve(i) for i in (0, 5, 10)], [1, 0.5, 0], atol=1e-6)
    np.testing.assert_allclose([Schedule()(i) for i in (0, 99)], [1, 1])
    held = Schedule(shape="linear", steps=9, warmup=1, hold=4, end=0.5)
    np.testing.assert_allclose([held(i) for i in range(10)], [0.5, 1, 1, 1, 1, 1, 0.875, 0.75, 0.625, 0.5])


def test_a_warm_up_slows_the_first_step():
    made = trainer(schedule=Schedule(warmup=3))
    state, _ = made.step(made.init(), toy.rows())
    assert_close(jnp.max(jnp.abs(state.trained["adapter.add"])), np.float32(0.1 / 4), dtype="bfloat16")


def poisoned(tree, b, key) -> Sums:
    """Not finite for a batch with a weight below zero."""
    sums = toy.loss(tree, b, key)
    return dataclasses.replace(sums, loss=sums.loss + jnp.where(jnp.any(b.weights < 0), jnp.nan, 0))


def test_after_a_loss_that_is_not_finite_nothing_changes_any_more():
    made = trainer(loss=poisoned)
    state, _ = run(made, 2)
    before = jax.tree.map(lambda leaf: np.array(jax.random.key_data(leaf) if leaf is state.key else leaf), state)
    bad = dataclasses.replace(toy.rows(9), weights=-jnp.ones((4, 6)))
    state, metrics = made.step(state, bad)
    assert not metrics["finite"]
    state, metrics = made.step(state, toy.rows(3))
    assert metrics["finite"]
    assert state.halted
    after = dataclasses.replace(state, key=jax.random.key_data(state.key), halted=before.halted)
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_an_infinite_gradient_under_a_finite_loss_is_caught_too():
    def steep(tree, b, key):
        sums = toy.loss(tree, b, key)
        return dataclasses.replace(sums, loss=sums.loss + jnp.sqrt(jnp.sum(tree["adapter"]["add"] * 0)))

    made = trainer(loss=steep)
    _, metrics = made.step(made.init(), toy.rows())
    assert np.isfinite(metrics["loss"])
    assert not metrics["finite"]


def test_a_batch_of_pads_changes_no_weight_and_is_finite():
    made = trainer()
    empty = dataclasses.replace(toy.rows(), weights=jnp.zeros((4, 6)))
    state, metrics = made.step(made.init(), empty)
    assert (metrics["finite"], metrics["loss"], metrics["weight"]) == (True, 0, 0)
    np.testing.assert_array_equal(state.trained["adapter.add"], 0)


def test_bf16_computes_in_bf16_and_trains_in_fp32():
    seen = {}

    def watch(tree, b, key):
        seen.update({"head": tree["params"]["head"]["weight"].dtype, "add": tree["adapter"]["add"].dtype})
        return toy.loss(tree, b, key)

    head = dataclasses.replace(HEAD, decay=0.0)
    made = trainer(toy.tree(), ADAPTER, head, loss=watch, dtype=jnp.bfloat16)
    state, losses = run(made, 8)
    assert seen == {"head": jnp.bfloat16, "add": jnp.float32}
    assert {leaf.dtype for leaf in state.trained.values()} == {jnp.dtype("float32")}
    assert made.frozen["params.embed.weight"].dtype == jnp.bfloat16
    change = np.asarray(state.trained["params.head.weight"]) - np.asarray(toy.tree()["params"]["head"]["weight"])
    assert 0 < np.abs(change).max() < 0.1  # no rounding to bf16 in between
    _, exact = run(trainer(toy.tree(), ADAPTER, head), 8)
    np.testing.assert_allclose(losses, exact, rtol=0.05)


def test_a_base_in_bf16_has_masters_in_fp32():
    made = trainer(toy.tree(jnp.bfloat16), HEAD)
    assert made.init().trained["params.head.weight"].dtype == jnp.float32


def test_the_second_step_compiles_nothing():
    made, batches = trainer(accumulate=2), [toy.rows(i) for i in range(3)]
    state, _ = made.step(made.init(), batches[0])
    with counted() as count:
        for b in batches:
            state, _ = made.step(state, b)
    assert count.programs == 0


def test_randomness_follows_the_seed_the_step_and_the_microbatch():
    def noisy(tree, b, key):
        sums = toy.loss(tree, b, key)
        return dataclasses.replace(sums, extra={"draw": jax.random.uniform(key) * sums.weight})

    def draws(seed, accumulate):
        made = trainer(loss=noisy, seed=seed, accumulate=accumulate)
        state, found = made.init(), []
        for _ in range(2):
            state, metrics = made.step(state, toy.rows())
            found.append(float(metrics["draw"]))
        return found

    first = draws(0, 1)
    assert first == draws(0, 1)
    assert len({*first, *draws(1, 1), *draws(0, 2)}) == 6


REFUSED = {
    "nothing to train": (lambda: trainer(None, Group(name="x", paths=("y.*",), rate=1)), "got no leaf that trains"),
    "an idle group": (
        lambda: trainer(None, ADAPTER, Group(name="x", paths=("y.*",), rate=1)),
        r"group 'x' matches no leaf with \('y.*',\); change its paths",
    ),
    "integers": (lambda: trainer(None, Group(name="x", paths=("*.slots",), rate=1)), "got no leaf that trains"),
    "no group": (lambda: OptimiserConfig(groups=()), r"got groups \[\], expected at least one"),
    "two names": (lambda: config(ADAPTER, ADAPTER), "each with its own name"),
    "a long warm-up": (lambda: Schedule(shape="cosine", steps=5, warmup=5), "got 5 steps of 5 before the fall"),
    "a shape": (lambda: Schedule(shape="step"), "expected constant, linear or cosine"),
    "odd rows": (lambda: run(trainer(accumulate=3), 1), "got 4 rows for 3 microbatches, expected a multiple"),
    "dots": (
        lambda: trainer({"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, Group(name="x", paths=("*",), rate=1)),
        "got two leaves at 'a.b'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_setting_ends_in_one_line(case):
    make, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
