"""The stop keeps what it promises, counts as a loop does, and its probabilities are calibrated."""

import math

import numpy as np
import pytest

from molora_jax.config import UserError
from molora_jax.retrieval import stop
from molora_jax.retrieval.chain import Chain
from molora_jax.retrieval.stop import Stop


def world(questions, seed):
    """Chains whose logits are calibrated up to scale 0.5 and shift -1, and what they rank."""
    rng, chains, golds = np.random.default_rng(seed), [], []
    while len(chains) < questions:
        logits = rng.normal(-1, 3, size=8)
        gold = set(np.flatnonzero(rng.random(8) < 1 / (1 + np.exp(1 - 0.5 * logits))).tolist())
        if gold:
            chains.append(Chain(tuple(int(i) for i in np.argsort(-logits)), 1, logits))
            golds.append(gold)
    return chains, golds


def naive_count(stop, chain):
    for k in range(1, len(chain.ranking)):
        rest = sum(1 / (1 + math.exp(-stop.scale * chain.scores[i] - stop.shift)) for i in chain.ranking[k:])
        if rest <= stop.threshold:
            return k
    return len(chain.ranking)


def whole(chains, golds, rule):
    return np.mean([gold <= set(c.ranking[: rule.count(c)]) for c, gold in zip(chains, golds, strict=True)])


@pytest.mark.parametrize("target", [0.5, 0.8, 0.95])
def test_the_promise_holds_where_it_was_fit_and_on_new_questions(target):
    chains, golds = world(400, seed=0)
    rule = stop.fit(chains, golds, target=target)
    assert [rule.count(c) for c in chains] == [naive_count(rule, c) for c in chains]
    got = whole(chains, golds, rule)
    assert got >= target
    looser = Stop(rule.scale, rule.shift, rule.threshold + 0.02)
    assert whole(chains, golds, looser) <= got
    assert got < target + 0.02  # no more is taken than the promise needs
    assert whole(*world(2000, seed=1), rule) > target - 0.07


def test_a_higher_target_takes_more():
    chains, golds = world(200, seed=2)
    means = [np.mean([stop.fit(chains, golds, target=t).count(c) for c in chains]) for t in (0.3, 0.6, 0.9)]
    assert means[0] < means[1] < means[2] < 8


def test_too_few_questions_promise_nothing():
    chains, golds = world(5, seed=3)
    rule = stop.fit(chains, golds, target=0.9)
    assert rule.threshold == -math.inf
    assert [rule.count(c) for c in chains] == [8] * 5


def test_probabilities_are_those_that_made_the_labels():
    rng = np.random.default_rng(4)
    logits = rng.normal(size=20_000) * 3
    labels = rng.random(len(logits)) < 1 / (1 + np.exp(1 - 0.5 * logits))
    scale, shift = stop.platt(logits, labels)
    assert scale == pytest.approx(0.5, abs=0.03)
    assert shift == pytest.approx(-1, abs=0.06)


def test_separable_labels_and_a_single_class_stay_finite():
    logits = np.array([-2.0, -1.0, 1.0, 2.0])
    scale, shift = stop.platt(logits, logits > 0)
    assert 0 < scale < 100
    assert abs(shift) < 1
    assert np.isfinite(stop.platt(logits, np.ones(4, bool))).all()
    # the optimum: no slope left, by differences
    targets = np.where(logits > 0, 3 / 4, 1 / 4)
    loss = lambda a, b: np.sum(np.logaddexp(0, a * logits + b) - targets * (a * logits + b))
    assert loss(scale, shift) <= min(loss(scale + d, shift) for d in (-1e-3, 1e-3))


@pytest.mark.parametrize(
    ("chains", "golds", "target", "line"),
    [
        ([], [], 0.9, "0 chains"),
        ([Chain((0,), 1, np.zeros(1))], [{0}], 1.0, "target 1.0"),
        ([Chain((0,), 1, np.zeros(1))], [{1}], 0.5, "not ranked"),
        ([Chain((0,), 1, np.zeros(1))], [set()], 0.5, "without evidence"),
    ],
)
def test_fits_that_cannot_be(chains, golds, target, line):
    with pytest.raises(UserError, match=line):
        stop.fit(chains, golds, target=target)
