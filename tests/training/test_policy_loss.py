"""Policy losses against loops in fp64 numpy: values, gradients, masks of unequal lengths, parts of a batch."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters.route import NONE
from molora_jax.config import UserError
from molora_jax.training import policy_loss
from molora_jax.training.algorithms import ALGORITHMS
from molora_jax.training.experience import experience
from molora_jax.training.optimiser import Group, OptimiserConfig
from molora_jax.training.rollout import Rollout
from molora_jax.training.step import Trainer
from tests.numerics import assert_close
from tests.training import toy

LENGTH, MOST = 9, 5
SIZES = ((3, 1), (2, 5), (4, 3), (1, 4))
"""Tokens of the prompts and of what follows them."""


def rollouts(seed: int = 0) -> list[Rollout]:
    """Drawn when the policy was quite another, so that ratios are clipped on either side."""
    rng = np.random.default_rng(seed)
    draw = lambda count: rng.integers(0, toy.VOCAB, count).tolist()
    return [Rollout(draw(p), draw(n), rng.uniform(-4, -1.5, n).tolist(), bool(p % 2)) for p, n in SIZES]


ADVANTAGES = np.array([0.7, -1.3, 0.0, 1.1])
KEPT = np.array([True, True, True, False])


def ratio_of(name: str, ratios: list[float], t: int) -> float:
    if name == "gspo":
        return math.exp(sum(map(math.log, ratios)) / len(ratios))
    return math.prod(ratios) if name == "rloo" else ratios[t]


def bounds(name: str) -> tuple[float, float]:
    """As the papers have them."""
    given = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
    low, high = given.get(name, (0.2, 0.2))
    return 1 - low, 1 + high


def by_hand(name: str, new: list[list[float]], found=None, kept=KEPT, frozen=None) -> float:
    """The loss of rollouts whose tokens have the log-probabilities `new`; weights of CISPO are those at `frozen`."""
    found, total = found or rollouts(), 0.0
    tokens = sum(len(own) for own in new)
    for i, own in enumerate(new):
        ratios = [math.exp(n - o) for n, o in zip(own, found[i].logprobs, strict=True)]
        terms = []
        for t in range(len(own)):
            low, high = bounds(name)
            if name == "cispo":
                at = math.exp((frozen or new)[i][t] - found[i].logprobs[t])
                terms.append(-min(max(at, low), high) * ADVANTAGES[i] * own[t])
            else:
                ratio = ratio_of(name, ratios, t)
                terms.append(-min(ratio * ADVANTAGES[i], min(max(ratio, low), high) * ADVANTAGES[i]))
        if not kept[i]:
            continue
        if name in ("dapo", "cispo"):
            total += sum(terms) / tokens
        elif name == "dr_grpo":
            total += sum(terms) / MOST / len(new)
        else:
            total += sum(terms) / len(terms) / len(new)
    return total


def batch(name: str, **changes):
    how = dict(length=LENGTH, most=MOST, counts=KEPT) | changes
    return experience(ALGORITHMS[name], rollouts(), ADVANTAGES, **how)


def ragged(values: np.ndarray) -> list[list[float]]:
    """The sampled tokens of rows."""
    return [values[i, p : p + n].astype(float).tolist() for i, (p, n) in enumerate(SIZES)]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_surrogates_and_their_gradients(name):
    b, rng = batch(name), np.random.default_rng(1)
    new = np.where(b.sampled, b.logprobs + rng.normal(0, 0.4, b.logprobs.shape), 5.0).astype(np.float32)
    if name == "gspo":  # whose bounds are narrow: two rollouts within them
        new[[0, 3]] = np.where(b.sampled, b.logprobs + 1e-4, 5.0)[[0, 3]]

    def total(new):
        terms, _ = policy_loss.surrogate(ALGORITHMS[name], new, b.logprobs, b.advantages, b.sampled)
        return jnp.sum(b.weights * terms)

    value, gradient = jax.value_and_grad(total)(jnp.asarray(new))
    want = ragged(new)
    np.testing.assert_allclose(value, by_hand(name, want), rtol=1e-5)
    numeric = np.zeros(new.shape)
    for i, own in enumerate(want):
        for t in range(len(own)):
            moved = lambda by, i=i, t=t: [
                [n + by * (j == i and s == t) for s, n in enumerate(row)] for j, row in enumerate(want)
            ]
            rise = by_hand(name, moved(1e-6), frozen=want) - by_hand(name, moved(-1e-6), frozen=want)
            numeric[i, SIZES[i][0] + t] = rise / 2e-6
    np.testing.assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-7)
    assert (np.asarray(gradient)[~np.asarray(b.sampled)] == 0).all()
    assert np.abs(numeric).max() > 1e-3


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_clip_share_is_of_the_tokens_that_the_clipping_stops(name):
    b, rng = batch(name), np.random.default_rng(2)
    new = np.where(b.sampled, b.logprobs + rng.normal(0, 0.4, b.logprobs.shape), 0).astype(np.float32)
    _, clipped = policy_loss.surrogate(ALGORITHMS[name], new, b.logprobs, b.advantages, b.sampled)
    stopped = np.zeros(new.shape, bool)
    low, high = bounds(name)
    for i, own in enumerate(ragged(new)):
        ratios = [math.exp(n - o) for n, o in zip(own, rollouts()[i].logprobs, strict=True)]
        for t in range(len(own)):
            ratio, gain = ratio_of(name, ratios, t), ADVANTAGES[i]
            cispo = name == "cispo" and not low <= ratio <= high
            stopped[i, SIZES[i][0] + t] = (
                cispo or name != "cispo" and (ratio > high and gain > 0 or ratio < low and gain < 0)
            )
    np.testing.assert_array_equal(clipped, stopped)


def decode(tree, b):
    tokens = b.tokens.reshape(-1)
    return tree["params"]["embed"]["weight"][tokens] + tree["adapter"]["add"][tokens]


def scores(tree, rollout: Rollout, temperature: float) -> list[float]:
    """Log-probabilities of a rollout's tokens, in fp64 numpy."""
    tokens = rollout.prompt + rollout.tokens
    embed, head = (np.asarray(tree["params"][name]["weight"], np.float64) for name in ("embed", "head"))
    found = []
    for t in range(len(rollout.prompt), len(tokens)):
        s = (embed + np.asarray(tree["adapter"]["add"], np.float64))[tokens[t - 1]] @ head.T / temperature
        found.append(s[tokens[t]] - math.log(sum(map(math.exp, s))))
    return found


CFG = dataclasses.make_dataclass("Cfg", ["tied"])(tied=False)


@pytest.mark.parametrize(("name", "temperature", "beta"), [("grpo", 1.0, 0.0), ("dapo", 0.7, 0.3), ("gspo", 1.6, 0.05)])
def test_the_loss_of_a_batch(name, temperature, beta):
    tree, other = toy.tree(), toy.tree(seed=1)
    reference = np.zeros((len(SIZES), LENGTH), np.float32)
    for i, rollout in enumerate(rollouts()):
        start = len(rollout.prompt)
        reference[i, start : start + len(rollout.tokens)] = scores(other, rollout, temperature)
    b = dataclasses.replace(batch(name), reference=reference if beta else None)
    new = [scores(tree, rollout, temperature) for rollout in rollouts()]
    got = policy_loss.logprobs(CFG, decode, tree, b, temperature=temperature)
    for row, want in zip(ragged(np.asarray(got)), new, strict=True):
        np.testing.assert_allclose(row, want, rtol=1e-5)
    assert (np.asarray(got)[~np.asarray(b.sampled)] == 0).all()
    sums = policy_loss.loss(CFG, ALGORITHMS[name], decode, temperature=temperature, beta=beta)(tree, b, None)
    want, away = by_hand(name, new), 0.0
    for i, own in enumerate(new):
        far = [math.exp(r - n) - (r - n) - 1 for n, r in zip(own, ragged(reference)[i], strict=True)]
        away += sum(far)
        weight = 1 / sum(n for _, n in SIZES) if name == "dapo" else 1 / len(own) / len(SIZES)
        want += KEPT[i] * beta * weight * sum(far)
    np.testing.assert_allclose(sums.loss, want, rtol=1e-5)
    np.testing.assert_allclose(sums.weight, 1, rtol=1e-6)
    assert ("kl" in sums.extra) == bool(beta)
    if beta:
        np.testing.assert_allclose(sums.extra["kl"], away / sum(n for _, n in SIZES), rtol=1e-5)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_without_old_probabilities_ratios_are_one_and_have_a_gradient(name):
    """Of the policy that drew the tokens: -A ∇ log π of each, whatever is clipped."""
    own = dataclasses.replace(batch(name), logprobs=None)
    loss = policy_loss.loss(CFG, ALGORITHMS[name], decode)
    new = policy_loss.logprobs(CFG, decode, toy.tree(), own)
    given = dataclasses.replace(own, logprobs=np.asarray(new))
    values = []
    for b in (own, given):
        of = lambda add, b=b: loss(toy.tree() | {"adapter": {"add": add}}, b, None).loss
        values.append(jax.value_and_grad(of)(toy.tree()["adapter"]["add"]))
    assert loss(toy.tree(), own, None).extra["clip_share"] == 0
    np.testing.assert_allclose(values[0][0], values[1][0], rtol=1e-5)
    np.testing.assert_allclose(values[0][1], values[1][1], rtol=1e-4, atol=1e-6)
    assert np.abs(values[0][1]).max() > 1e-3


def test_microbatches_add_up_to_the_whole_batch():
    config = OptimiserConfig(groups=(Group(name="a", paths=("adapter.add",), rate=0.1),), clip=None)
    results = []
    for parts in (1, 2, 4):
        loss = policy_loss.loss(CFG, ALGORITHMS["dapo"], decode)
        trainer = Trainer(toy.tree(), loss, config, accumulate=parts)
        state, metrics = trainer.step(trainer.init(), batch("dapo"))
        results.append((np.asarray(state.trained["adapter.add"]), np.asarray(metrics["loss"]), metrics["clip_share"]))
    for got in results[1:]:
        for value, want in zip(got, results[0], strict=True):
            assert_close(np.asarray(value), np.asarray(want), "model")


def test_kl_of_equals_is_nothing_and_never_negative():
    away = policy_loss.kl(jnp.array([-1.0, -2.0, -0.1, -30.0]), jnp.array([-1.0, -1.0, -3.0, 0.0]))
    np.testing.assert_allclose(away[:3], [0, math.e - 2, math.exp(-2.9) + 1.9], rtol=1e-5)
    assert np.isfinite(away[3])


def test_rows_hold_prompts_and_what_follows_them():
    chosen = [np.arange((p + n) * 2).reshape(-1, 2) for p, n in SIZES]
    b = batch("grpo", choices=chosen, ids=["a", "b", "c", "d"])
    for i, (rollout, (p, n)) in enumerate(zip(rollouts(), SIZES, strict=True)):
        assert b.tokens[i].tolist() == rollout.prompt + rollout.tokens + [0] * (LENGTH - p - n)
        assert b.positions[i].tolist() == [*range(p + n)] + [0] * (LENGTH - p - n)
        assert b.valid[i].tolist() == [t < p + n for t in range(LENGTH)]
        assert b.sampled[i].tolist() == [p <= t < p + n for t in range(LENGTH)]
        np.testing.assert_array_equal(b.choices[i, : p + n], chosen[i])
        assert (b.choices[i, p + n :] == NONE).all()
    part = b.rows(slice(1, None, 2))
    assert part.ids == ("b", "d")
    np.testing.assert_array_equal(part.tokens, b.tokens[1::2])
    with pytest.raises(UserError, match="got one of 7 tokens for rows of 6"):
        batch("grpo", length=6)
