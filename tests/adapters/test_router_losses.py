"""Auxiliary losses and metrics of routers, against plain loops in fp64."""

import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters import router_losses as losses
from molora_jax.adapters.route import NONE, Choice
from molora_jax.adapters.router_metrics import measure
from molora_jax.adapters.selection import Placement
from molora_jax.config import UserError
from molora_jax.nn.layout import dense
from tests.adapters.routing import softmax
from tests.numerics import assert_close

RNG = np.random.default_rng(0)
L, B, T, J = 3, 3, 5, 4
SCORES = 2 * RNG.standard_normal((L, B * T, J))
VALID = np.array([[1, 1, 0, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]], bool)  # the last row is nothing but pads
SEGMENTS = np.array([[0, 0, 0, 0, 0], [4, 4, 4, 7, 7], [0, 0, 0, 0, 0]])
LAYOUT = dense(B, T, valid=VALID, segments=SEGMENTS)
P = softmax(SCORES)
REAL = np.flatnonzero(VALID)
HELD = jnp.asarray(SCORES, jnp.float32)


def test_token_losses():
    for k in (1, 2):
        want = []
        for layer in range(L):
            share = np.zeros(J)
            for n in REAL:
                share[np.argsort(-SCORES[layer, n])[:k]] += 1 / k / len(REAL)
            want.append(J * sum(share[i] * P[layer, REAL, i].mean() for i in range(J)))
        assert_close(losses.load_balance(HELD, VALID.reshape(-1), k), np.mean(want))
    log_z = np.log(np.exp(SCORES).sum(-1))[:, REAL]
    assert_close(losses.z_loss(HELD, VALID.reshape(-1)), (log_z**2).mean())
    assert_close(losses.entropy(HELD, VALID.reshape(-1)), -(P * np.log(P)).sum(-1)[:, REAL].mean())
    assert_close(losses.impurity(HELD, VALID.reshape(-1)), 1 - (P**2).sum(-1)[:, REAL].mean())
    assert_close(losses.impurity(HELD), 1 - (P**2).sum(-1).mean())
    even = jnp.zeros((1, J, J)) + 1e-3 * jnp.eye(J)
    np.testing.assert_allclose(losses.load_balance(even), 1, rtol=1e-5)


def documents():
    """Places of the valid tokens of each document."""
    for b in range(B):
        for s in np.unique(SEGMENTS[b]):
            at = np.flatnonzero(VALID[b] & (SEGMENTS[b] == s)) + b * T
            if len(at):
                yield at


def test_consistency_is_of_whole_documents():
    want = [1 - (P[layer, at].mean(0) ** 2).sum() for layer in range(L) for at in documents()]
    assert_close(losses.consistency(HELD, LAYOUT), np.mean(want))


def test_localized_balance():
    types, rows, want = np.array([0, 0, 1, 1]), np.array([0, 1, 0]), []
    for layer in range(L):
        z = np.zeros((B, J))
        for b in range(B):
            for j in range(J):
                total = sum(P[layer, b * T + t, j] for t in range(T) if VALID[b, t])
                z[b, j] = total * (1.1 if types[j] == rows[b] else 0.9)
        want.append(z.var() / z.mean())
    assert_close(losses.localized_balance(jnp.asarray(P, jnp.float32), LAYOUT, types, rows), np.mean(want))


def test_metrics_layer_by_layer():
    slots = np.array([5, 2, NONE, 0])
    ids = slots[RNG.integers(0, J, (L, B * T))]
    got = measure(Choice(ids=jnp.asarray(ids), scores=HELD), Placement(jnp.asarray(slots), 6), LAYOUT)
    ordered = np.sort(P, axis=-1)[..., ::-1]
    assert_close(got["top_mass"], ordered[:, REAL, 0].mean(1))
    assert_close(got["margin"], (ordered[..., 0] - ordered[..., 1])[:, REAL].mean(1))
    assert_close(got["entropy"], -(P * np.log(P)).sum(-1)[:, REAL].mean(1))
    assert_close(got["load"], np.stack([(ids[:, REAL] == s).mean(1) for s in slots], axis=1))
    pairs = [(a, b) for at in documents() for a, b in zip(at[:-1], at[1:], strict=True)]
    assert_close(got["switch_rate"], np.mean([ids[:, a] != ids[:, b] for a, b in pairs], axis=0))
    with pytest.raises(UserError, match="without scores"):
        measure(Choice(ids=jnp.asarray(ids)), Placement(jnp.asarray(slots), 6), LAYOUT)
