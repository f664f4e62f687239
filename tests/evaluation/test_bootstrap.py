"""The paired bootstrap against all resamples there are, against the normal theory, and by its coverage."""

import itertools

import numpy as np
import pytest

from molora_jax.config import UserError
from molora_jax.evaluation import bootstrap


def test_against_every_resample_of_four_questions():
    ours, theirs = np.array([1.0, 0.0, 1.0, 0.5]), np.array([0.0, 0.5, 1.0, 0.0])
    gaps = ours - theirs
    means = np.array([gaps[list(draw)].mean() for draw in itertools.product(range(4), repeat=4)])
    got = bootstrap.paired(ours, theirs, level=0.8, resamples=200_000)
    assert got.mean == gaps.mean()
    assert got.n == 4
    assert [got.low, got.high] == pytest.approx(np.quantile(means, [0.1, 0.9]), abs=1e-12)
    assert got.share == pytest.approx(np.mean(means <= 0), abs=0.01)


def test_against_every_resample_of_three_seeds_and_four_questions():
    gaps = np.array([[0.93, -0.11, -0.52, 0.34], [0.27, 0.56, 1.07, -0.72], [0.13, 0.01, -0.4, 0.6]])
    draw = lambda count: [list(each) for each in itertools.product(range(count), repeat=count)]
    means = np.array([gaps[np.ix_(seeds, questions)].mean() for seeds in draw(3) for questions in draw(4)])
    got = bootstrap.paired(gaps + 2, np.full((3, 4), 2.0), level=0.8, resamples=200_000)
    assert (got.mean, got.n) == (pytest.approx(gaps.mean()), 4)
    assert [got.low, got.high] == pytest.approx(np.quantile(means, [0.1, 0.9]), abs=0.005)
    assert got.share == pytest.approx(np.mean(means <= 0), abs=0.01)
    assert bootstrap.paired(gaps[:1], gaps[:1] * 0) == bootstrap.paired(gaps[0], gaps[0] * 0)  # one seed has no spread


def test_many_questions_give_the_normal_interval():
    rng = np.random.default_rng(0)
    ours, theirs = rng.random(2000), rng.random(2000)
    gaps = ours - theirs
    half = 1.96 * gaps.std() / 2000**0.5
    got = bootstrap.paired(ours, theirs)
    assert [got.low, got.high] == pytest.approx([gaps.mean() - half, gaps.mean() + half], abs=0.1 * half)


def test_what_makes_questions_hard_cancels():
    hard = np.random.default_rng(1).random(100) * 50
    got = bootstrap.paired(hard + 0.1, hard)
    assert [got.low, got.high] == pytest.approx([0.1, 0.1])
    assert got.share == 0
    assert bootstrap.paired(hard, hard).share == 1  # a tie is no win


def test_intervals_cover_as_often_as_they_say():
    rng = np.random.default_rng(2)
    found = [
        bootstrap.paired(rng.normal(0.3, 1, 80), rng.normal(0, 1, 80), level=0.9, resamples=500) for _ in range(300)
    ]
    assert np.mean([d.low <= 0.3 <= d.high for d in found]) == pytest.approx(0.9, abs=0.06)


def test_swapping_the_systems_mirrors_the_interval_and_seeds_repeat():
    ours, theirs = np.random.default_rng(3).random((2, 50))
    one, other = bootstrap.paired(ours, theirs), bootstrap.paired(theirs, ours)
    assert [one.mean, one.low, one.high] == pytest.approx([-other.mean, -other.high, -other.low])
    assert bootstrap.paired(ours, theirs) == one
    assert bootstrap.paired(ours, theirs, seed=1) != one


@pytest.mark.parametrize(
    ("ours", "theirs", "more", "line"),
    [
        ([1.0], [1.0, 2.0], {}, r"\[1\] and \[2\]"),
        ([], [], {}, "for every question"),
        ([float("nan")], [0.0], {}, "not finite"),
        ([1.0], [0.0], dict(level=95), "level 95"),
    ],
)
def test_comparisons_that_are_none(ours, theirs, more, line):
    with pytest.raises(UserError, match=line):
        bootstrap.paired(ours, theirs, **more)
