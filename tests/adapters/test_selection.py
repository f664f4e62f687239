"""Every rule from scores to a choice, against fp64 numpy: values, straight-through gradients, what is given."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters.bank import Site, update
from molora_jax.adapters.route import NONE, ROUTED, Choice
from molora_jax.adapters.selection import Placement, Rule, log_prob, select
from tests.adapters.routing import deltas, identical, softmax
from tests.numerics import assert_close

RNG = np.random.default_rng(0)
N, D, F, E, R = 9, 5, 4, 4, 2
SLOTS = np.array([2, 0, NONE, 3])  # of J = 4 experts, one of them the base; slot 1 is of no router
SCORES, X, Y = RNG.standard_normal((N, 4)), RNG.standard_normal((N, D)), RNG.standard_normal((N, F))
SITE = Site(
    RNG.standard_normal((E, R, D)).astype(np.float32),
    RNG.standard_normal((E, R, F)).astype(np.float32),
    np.array([0.5, 1, 2, 1.5], np.float32),
    bias=RNG.standard_normal((E, F)).astype(np.float32),
)
OWN = deltas(X, SITE) + (SITE.scale[:, None] * SITE.bias)[:, None].astype(np.float64)  # [E N F], with their biases
BY_EXPERT = np.stack([OWN[s] if s >= 0 else np.zeros((N, F)) for s in SLOTS])  # [J N F]
BEST = SCORES.argmax(-1)
MODES = [Rule("hard"), Rule("hard_dense"), Rule("switch"), Rule("soft"), Rule("top_k", k=2), Rule("equal", k=3)]


def mixed(weights: np.ndarray) -> np.ndarray:
    return np.einsum("nj,jnf->nf", weights, BY_EXPERT)


def expected(rule: Rule, scores: np.ndarray) -> np.ndarray:
    """The updates [N F]."""
    p, out = softmax(scores / 0.8), np.zeros((N, 4))
    for n in range(N):
        order = np.argsort(-scores[n])
        if rule.mode in ("hard", "hard_dense"):
            out[n, order[0]] = 1
        elif rule.mode == "switch":
            out[n, order[0]] = p[n, order[0]]
        elif rule.mode == "soft":
            out[n] = p[n]
        elif rule.mode == "top_k":
            out[n, order[:2]] = p[n, order[:2]] / p[n, order[:2]].sum()  # normalised top-2
        else:
            out[n, order[:3]] = 1 / 3
    return mixed(out)


def surrogate(rule: Rule, scores: np.ndarray) -> float:
    """What a rule's gradient is the gradient of, the choice held fixed: Σ y·(updates)."""
    p = softmax(scores / 0.8)
    chosen = np.arange(4) == BEST[:, None]
    if rule.mode in ("hard", "switch"):
        weights = np.where(chosen, p, 0)
    elif rule.mode == "hard_dense":
        weights = p * (SLOTS[BEST] >= 0)[:, None]  # a token on the base routes nothing
    elif rule.mode == "soft":
        weights = p
    elif rule.mode == "top_k":
        kept = np.argsort(np.argsort(-SCORES, axis=-1), axis=-1) < 2
        weights = np.where(kept, p, 0) / np.where(kept, p, 0).sum(-1, keepdims=True)
    else:
        weights = np.zeros_like(p)
    return float((Y * mixed(weights)).sum())


def compute(rule, scores, given=None):
    choice = select(rule, scores, Placement(jnp.asarray(SLOTS), E), given, temperature=0.8)
    return update(jnp.asarray(X, jnp.float32).T, jax.tree.map(jnp.asarray, SITE), choice).T


quick = functools.partial(jax.jit, static_argnums=0)
updates = quick(compute)
slope = quick(lambda rule, *args: jax.grad(lambda s, *given: jnp.sum(Y * compute(rule, s, *given)))(*args))


@pytest.mark.parametrize("rule", MODES, ids=lambda r: r.mode)
def test_values_and_gradients(rule):
    scores = SCORES.astype(np.float32)
    assert_close(updates(rule, scores), expected(rule, SCORES))
    grad = slope(rule, scores)
    step, want = 1e-6, np.zeros_like(SCORES)
    for at in itertools.product(range(N), range(4)):
        moved = np.zeros_like(SCORES)
        moved[at] = step
        want[at] = (surrogate(rule, SCORES + moved) - surrogate(rule, SCORES - moved)) / (2 * step)
    assert np.abs(np.asarray(grad) - want).max() <= 2e-6 * max(np.abs(want).max(), 1)


@pytest.mark.parametrize("rule", MODES, ids=lambda r: r.mode)
def test_a_recorded_route_has_the_gradient_of_the_run_that_took_it(rule):
    scores = SCORES.astype(np.float32)
    took = select(rule, scores, Placement(jnp.asarray(SLOTS), E), temperature=0.8)
    want = slope(rule, scores)
    assert (np.abs(want).max() > 0) == (rule.mode != "equal")
    assert_close(slope(rule, scores, took), want)
    if took.ids is not None:  # a record of ids alone is enough
        assert_close(slope(rule, scores, Choice(ids=took.ids)), want)
    # under other scores the record keeps its value, and has their gradient
    other = np.roll(scores, 1, axis=1)
    identical(updates(rule, other, took), updates(rule, scores, took))


@pytest.mark.parametrize("rule", MODES, ids=lambda r: r.mode)
def test_given_ids_are_kept_and_the_rest_decided(rule):
    ids = np.array([ROUTED, 1, NONE, 2, ROUTED, 0, 3, ROUTED, 1], np.int32)
    kept = ids != ROUTED
    want = expected(rule, SCORES)
    want[kept] = [OWN[i, n] if i >= 0 else np.zeros(F) for n, i in zip(np.flatnonzero(kept), ids[kept], strict=True)]
    got = updates(rule, SCORES.astype(np.float32), Choice(ids=ids, gate=np.ones(N, np.float32)))
    assert_close(got, want)


def test_switch_recomputes_a_gate_that_is_not_given():
    ids = np.array([2, 1, NONE, 2, 0, 0, 3, 3, 1], np.int32)  # slot 1 is none of the router's: at unit scale
    p = softmax(SCORES / 0.8)
    column = {slot: j for j, slot in enumerate(SLOTS)}
    want = np.stack(
        [(p[n, column[i]] if i in column else 1) * (OWN[i, n] if i >= 0 else np.zeros(F)) for n, i in enumerate(ids)]
    )
    assert_close(updates(Rule("switch"), SCORES.astype(np.float32), Choice(ids=ids)), want)


def test_given_weights_are_kept_to_the_bit():
    weights = RNG.random((N, E)).astype(np.float32)
    for rule in MODES:
        choice = select(rule, SCORES.astype(np.float32), Placement(jnp.asarray(SLOTS), E), Choice(weights=weights))
        identical(choice.weights, weights)


@pytest.mark.parametrize("rule", MODES, ids=lambda r: r.mode)
def test_experts_that_are_not_eligible_are_not_chosen(rule):
    eligible = RNG.random((N, 4)) < 0.5
    eligible[0] = False
    scores = SCORES.astype(np.float32)
    choice = select(rule, scores, Placement(jnp.arange(4), 4), temperature=0.8, eligible=eligible)
    if choice.weights is not None and choice.ids is None:
        assert (np.asarray(choice.weights)[~eligible] == 0).all()
        np.testing.assert_allclose(choice.weights.sum(-1), eligible.any(-1), rtol=1e-6)
    else:
        want = np.where(eligible.any(-1), np.where(eligible, SCORES, -np.inf).argmax(-1), NONE)
        identical(choice.ids, want)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_log_prob_of_a_set_is_that_of_all_its_orders(k):
    p = softmax(SCORES / 0.8)
    for chosen in itertools.combinations(range(4), k):
        want = np.zeros(N)
        for order in itertools.permutations(chosen):
            left, term = np.ones(N), np.ones(N)
            for j in order:
                term, left = term * p[:, j] / left, left - p[:, j]
            want += term
        mask = np.broadcast_to(np.isin(np.arange(4), chosen), (N, 4))
        got = log_prob(jnp.asarray(SCORES, jnp.float32), jnp.asarray(mask), k, 0.8)
        np.testing.assert_allclose(got, np.log(want), rtol=2e-5, atol=2e-6)
