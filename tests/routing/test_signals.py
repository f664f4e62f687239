"""Signals against fp64 numpy, and nothing that was not declared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.routing import signals
from molora_jax.routing.program import NAMES, Program
from tests.numerics import assert_close
from tests.routing.numpy_heads import softmax

LOGITS = [np.random.default_rng(i).normal(0, scale, V) for i, (V, scale) in enumerate([(2, 1), (7, 3), (331, 8)])]
LOGITS.append(np.array([2.0, -1.0, 2.0, 0.5]))  # a tie
LOGITS.append(np.array([800.0, 10.0, -900.0]))


@pytest.mark.parametrize("logits", LOGITS, ids=len)
def test_distribution_signals(logits):
    mass = softmax(logits)
    ordered = np.sort(mass)[::-1]
    wide = jnp.asarray(logits, jnp.float32)
    assert_close(signals.entropy(wide), -np.sum(mass[mass > 0] * np.log(mass[mass > 0])), "model")
    assert_close(signals.max_prob(wide), ordered[0])
    np.testing.assert_allclose(signals.margin(wide), ordered[0] - ordered[1], rtol=1e-5, atol=1e-6)
    for token in (0, len(logits) - 1):
        want = logits[token] - logits.max() - np.log(np.sum(np.exp(logits - logits.max())))
        np.testing.assert_allclose(signals.logprob(wide, token), want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(signals.log_probs(wide)[token], want, rtol=1e-5, atol=1e-5)
    top = signals.top_k(wide, 2)
    np.testing.assert_allclose(top.values, np.sort(logits)[::-1][:2], rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(wide)[top.ids], top.values)


def test_a_masked_vocabulary_counts_nothing():
    logits = np.array([1.0, 2.0, 0.5], np.float32)
    padded = np.append(logits, [-np.inf] * 3).astype(np.float32)
    for signal in (signals.entropy, signals.max_prob, signals.margin):
        np.testing.assert_array_equal(signal(jnp.asarray(padded)), signal(jnp.asarray(logits)))
    only = jnp.array([-jnp.inf, 3.0, -jnp.inf])
    assert (float(signals.entropy(only)), float(signals.margin(only))) == (0, 1)


def test_bf16_logits_are_measured_in_fp32():
    logits = jnp.asarray(LOGITS[2], jnp.bfloat16)
    for signal in (signals.entropy, signals.max_prob, signals.margin):
        assert signal(logits).dtype == jnp.float32
        np.testing.assert_array_equal(signal(logits), signal(logits.astype(jnp.float32)))


def test_patterns_hit_at_the_end_only():
    patterns = ((5,), (4, 5), (3, 4, 5), (5, 4))
    hits = lambda *recent: signals.pattern_hits(patterns, jnp.asarray(recent, jnp.int32)).tolist()
    assert signals.window(patterns) == 3
    assert hits(3, 4, 5) == [True, True, True, False]
    assert hits(4, 4, 5) == [True, True, False, False]
    assert hits(-1, -1, 5) == [True, False, False, False]
    assert hits(4, 5, 4) == [False, False, False, True]
    assert hits(9, 9, 3, 4, 5) == [True, True, True, False]
    assert signals.pattern_hits((), jnp.zeros(0, jnp.int32)).shape == (0,)


def program_with(*names: str) -> Program:
    program = Program()
    program.signals, program.top_k, program.patterns = frozenset(names), 2, ((1,),)
    return program


KNOWN = dict(
    position=jnp.int32(4),
    since_handoff=jnp.int32(1),
    mode=jnp.int32(0),
    stop=jnp.bool_(False),
    hidden=jnp.ones(3),
    span_logprobs=jnp.zeros(2),
    score=jnp.float32(0),
    accepted=jnp.int32(0),
)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_what_is_not_declared_does_not_exist(name):
    measured = signals.measure(
        program_with(name), logits=jnp.arange(4.0), token=jnp.int32(1), recent=jnp.array([1]), **KNOWN
    )
    assert {field for field in NAMES if getattr(measured, field) is not None} == {name}
    if name in KNOWN:
        np.testing.assert_array_equal(getattr(measured, name), KNOWN[name])


def test_undeclared_logits_are_not_read():
    """The compiled program has no operation on them."""
    measure = lambda logits: signals.measure(
        program_with("position"), logits=logits, token=jnp.int32(1), recent=jnp.array([1]), **KNOWN
    )
    jaxpr = jax.make_jaxpr(measure)(jnp.arange(4.0)).jaxpr
    assert not any(jaxpr.invars[0] in eqn.invars for eqn in jaxpr.eqns)


def test_a_batch_is_its_rows():
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 2, (5, 31)), jnp.float32)
    program = program_with("entropy", "margin", "max_prob", "top_k")
    one = lambda row: signals.measure(program, logits=row, token=jnp.int32(1), recent=jnp.array([1]), **KNOWN)
    batch = jax.vmap(one)(logits)
    for i, row in enumerate(logits):
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-5), batch, one(row))
