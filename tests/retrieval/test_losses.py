"""Every term of the loss against a loop in fp64, and gradients of a whole chain."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.config import UserError
from molora_jax.retrieval import chain, losses, mara, mixers
from molora_jax.retrieval.losses import LossConfig
from molora_jax.retrieval.mara import Scores
from tests.numerics import assert_close
from tests.retrieval import router_reference as reference


def batch(seed=0, rows=4, count=6):
    """Logits, gold, keep; question 1 keeps no gold, question 2 keeps nothing but gold, the last keeps nothing."""
    rng = np.random.default_rng(seed)
    x, gold = rng.normal(size=(rows, count)).astype(np.float32) * 2, rng.random((rows, count)) < 0.4
    gold[0, :2] = True, False
    keep = rng.random((rows, count)) < 0.8
    keep[0, :2] = True
    keep[1], keep[2], keep[3] = ~gold[1], gold[2], False
    return np.where(keep, x, -np.inf), gold, keep


def naive_bce(x, gold, keep, pos_weight):
    terms = []
    for i, j in zip(*np.nonzero(keep), strict=True):
        p = 1 / (1 + math.exp(-x[i, j]))
        terms.append(-pos_weight * math.log(p) if gold[i, j] else -math.log(1 - p))
    return sum(terms) / len(terms)


def naive_hinge(x, gold, keep, margin):
    means = []
    for row, g, k in zip(x.astype(np.float64), gold, keep, strict=True):
        pairs = [max(0, margin - p + n) for p in row[g & k] for n in row[~g & k]]
        means += [sum(pairs) / len(pairs)] if pairs else []
    return sum(means) / len(means)


def naive_listwise(x, gold, keep):
    means = []
    for row, g, k in zip(x.astype(np.float64), gold, keep, strict=True):
        total = sum(math.exp(v) for v in row[k])
        terms = [-math.log(math.exp(v) / total) for v in row[g & k]]
        means += [sum(terms) / len(terms)] if terms else []
    return sum(means) / len(means)


@pytest.mark.parametrize("seed", range(3))
def test_terms_against_loops(seed):
    x, gold, keep = batch(seed)
    assert_close(losses.bce(x, gold, keep, 8.0), naive_bce(x, gold, keep, 8.0))
    assert_close(losses.hinge(x, gold, keep, 1.5), naive_hinge(x, gold, keep, 1.5))
    assert_close(losses.listwise(x, gold, keep), naive_listwise(x, gold, keep))


@pytest.mark.parametrize("term", [lambda *a: losses.bce(*a, 8.0), lambda *a: losses.hinge(*a, 1.0), losses.listwise])
def test_terms_of_nothing_are_zero_and_flat(term):
    x, gold, _ = batch()
    value, slope = jax.value_and_grad(term)(jnp.asarray(x), gold, np.zeros_like(gold))
    assert value == 0
    assert not np.any(slope)


def test_a_chain_weighs_its_passes_and_leaves_out_what_it_chose():
    rng = np.random.default_rng(5)
    shape = (3, 2, 5)
    local, slots = rng.normal(size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32)
    gold, valid = rng.random((2, 5)) < 0.5, np.ones((2, 5), bool)
    gold[:, :2], valid[1, 4] = [True, False], False
    anchors = np.array([[3, 0], [1, -1]])
    cfg = LossConfig(pos_weight=3.0, slots=0.25, hinge=0.75, margin=0.5, listwise=0.1, earlier=0.5)
    want = 0.0
    for k, weight in enumerate([0.25, 0.25, 0.5]):
        keep = valid.copy()
        for row in range(2):
            for a in anchors[row, :k]:
                if a >= 0:
                    keep[row, a] = False
        want += weight * naive_bce(local[k], gold, keep, 3.0)
        want += weight * 0.25 * naive_bce(slots[k], gold, keep, 3.0)
        want += weight * 0.75 * naive_hinge(local[k], gold, valid, 0.5)
        want += weight * 0.1 * naive_listwise(local[k], gold, keep)
    passes = [Scores(jnp.asarray(a), jnp.asarray(b)) for a, b in zip(local, slots, strict=True)]
    loss, terms = losses.chain(cfg, passes, anchors, gold, valid)
    assert_close(loss, np.asarray(want))
    assert terms.keys() == {"local", "slots", "hinge", "listwise"}


@pytest.mark.parametrize("mixer", mixers.KINDS)
def test_gradients_reach_every_parameter_and_are_finite(mixer):
    cfg = reference.config(mixer, chained=True)
    tree, rng = reference.params(cfg), np.random.default_rng(7)
    tokens, real = rng.standard_normal((2, 4, 3, cfg.encoding)).astype(np.float32), rng.random((2, 4, 3)) < 0.8
    valid = np.array([[True] * 4, [True] * 3 + [False]])
    real[1, 3], gold = False, np.array([[True, False, True, False], [False, True, False, False]])

    def loss(tree):
        e = mara.pool(cfg, tree, tokens, real)
        scores, picks = chain.embedded(cfg, tree, e, valid, passes=2)
        passes = [jax.tree.map(lambda leaf, k=k: leaf[k], scores) for k in range(2)]
        return losses.chain(LossConfig(listwise=0.5), passes, picks[:, :1], gold, valid)[0]

    slopes = jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(tree))
    for path, slope in slopes:
        assert np.all(np.isfinite(slope)), path
        # a key's bias moves all scores of a query alike, which the softmax does not see
        assert np.any(slope != 0) or path[-2:] == ("k", "bias"), path


def test_passes_need_their_anchors():
    scores = Scores(jnp.zeros((1, 2)), None)
    with pytest.raises(UserError, match="got 3 passes and 1 anchors"):
        losses.chain(LossConfig(), [scores] * 3, jnp.zeros((1, 1), int), jnp.ones((1, 2), bool), jnp.ones((1, 2), bool))
