"""Chains against plain loops and against trying everything."""

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molora_jax.config import UserError
from molora_jax.retrieval import chain
from molora_jax.retrieval.chain import search
from tests.numerics import assert_close
from tests.retrieval import router_reference as reference

COUNT = 5


def table(seed):
    """Logits [COUNT] that depend on the anchors and their order, and on nothing else."""

    def logits(anchors):
        return np.random.default_rng([seed, len(anchors), *anchors]).normal(size=COUNT)

    return logits


def scorer(logits):
    return lambda anchors, racing: np.stack([logits(a) for a in anchors])


def naive_chain(logits, passes):
    picks = []
    for _ in range(passes):
        last = logits(tuple(picks))
        picks.append(max((i for i in range(COUNT) if i not in picks), key=lambda i: last[i]))
    return picks, last


@given(st.integers(0, 999), st.integers(1, COUNT))
def test_the_published_chain_against_a_loop(seed, passes):
    logits = table(seed)
    picks, last = naive_chain(logits, passes)
    rest = sorted(set(range(COUNT)) - set(picks), key=lambda i: -last[i])
    got = search(scorer(logits), COUNT, passes=passes)
    assert got.ranking == (*picks, *rest)
    assert got.picks == passes
    for k, pick in enumerate(picks):
        assert got.scores[pick] == logits(tuple(picks[:k]))[pick]
    assert all(got.scores[i] == last[i] for i in rest)


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


@given(st.integers(0, 999))
def test_wide_beams_find_the_best_of_all_sequences(seed):
    logits, passes = table(seed), 3
    total = lambda picks: sum(log_sigmoid(logits(picks[:k])[pick]) for k, pick in enumerate(picks))
    best = max(itertools.permutations(range(COUNT), passes), key=total)
    assert search(scorer(logits), COUNT, passes=passes, beams=COUNT**passes).ranking[:passes] == best


def test_a_beam_of_two_keeps_the_second_best_first_pick():
    first = {(): [2.0, 1.9, -9], (0,): [0, -3, -3], (1,): [3.0, 0, -3]}
    score = lambda anchors, racing: np.stack([first[a] for a in anchors])
    assert search(score, 3, passes=2).ranking == (0, 1, 2)
    assert search(score, 3, passes=2, beams=2).ranking == (1, 0, 2)


def test_a_cascade_by_hand():
    seen = []

    def score(anchors, racing):
        seen.append((anchors[0], racing[0].tolist()))
        rows = {(): [5, 4, 3, 2, 1, 0], (0,): [np.nan, 1, 3, 2, np.nan, np.nan], (0, 2): [0, 7, 0, 8, 0, 0]}
        return np.where(racing, np.nan_to_num(rows[anchors[0]]), np.nan)

    got = search(score, 6, passes=2, drop=2)
    assert got.ranking == (0, 2, 3, 1, 4, 5)  # 4 and 5 were dropped after the first pass
    assert seen == [((), [True] * 6), ((0,), [True] * 4 + [False] * 2)]
    assert search(score, 6, passes=3, drop=2).ranking == (0, 2, 3, 1, 4, 5)[:2] + (3, 1, 4, 5)
    assert got.scores.tolist() == [5, 1, 3, 2, 1, 0]


@given(st.integers(0, 99), st.integers(1, 7), st.integers(1, 3), st.integers(0, 6))
def test_every_candidate_is_ranked_once(seed, passes, beams, drop):
    got = search(scorer(table(seed)), COUNT, passes=passes, beams=beams, drop=drop)
    assert sorted(got.ranking) == list(range(COUNT))
    assert 1 <= got.picks <= min(passes, COUNT)


def test_equal_scores_go_to_the_earlier_candidate():
    assert search(lambda anchors, racing: np.zeros(racing.shape), 4, passes=2, beams=2).ranking == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("given", "line"),
    [(dict(count=0), "0 candidates"), (dict(passes=0), "0 passes"), (dict(beams=0), "0 beams"), (dict(drop=-1), "-1")],
)
def test_searches_that_cannot_be(given, line):
    with pytest.raises(UserError, match=line):
        search(scorer(table(0)), **dict(count=COUNT) | given)


@pytest.mark.parametrize("logits", [np.zeros((1, 4)), np.full((1, COUNT), np.nan)])
def test_scores_that_are_none(logits):
    with pytest.raises(UserError, match="got scores"):
        search(lambda anchors, racing: logits, COUNT)


@pytest.mark.parametrize("mixer", ["mamba", "transformer"])
def test_an_embedded_chain_equals_the_search_over_the_reference_router(mixer):
    cfg = reference.config(mixer, chained=True)
    params, x = reference.params(cfg), reference.segments(2, 6)
    valid = np.array([[True] * 6, [False, True, False, True, True, False]])
    run = jax.jit(chain.embedded, static_argnums=0, static_argnames="passes")
    scores, picks = run(cfg, params, x, valid, passes=4)
    found = chain.finish(scores.local, picks, valid)
    for row in range(2):
        at = np.flatnonzero(valid[row])
        logits = lambda anchors, at=at, row=row: reference.score(cfg, params, x[row, at], anchors)[0]
        want = search(lambda a, racing, logits=logits: np.stack([logits(b) for b in a]), len(at), passes=4)
        assert found[row].ranking == tuple(at[list(want.ranking)])
        assert found[row].picks == want.picks
        assert_close(found[row].scores[at], want.scores, "model", np.float32)
        assert np.all(np.isneginf(found[row].scores[~valid[row]]))
    assert picks[1, 3] == -1  # three candidates, four passes


def test_what_is_taken_can_go_in_reading_order():
    assert chain.take((4, 0, 2, 1), 3) == (4, 0, 2)
    assert chain.take((4, 0, 2, 1), 3, "reading") == (0, 2, 4)
    with pytest.raises(UserError, match="rank or reading"):
        chain.take((0,), 1, "random")
