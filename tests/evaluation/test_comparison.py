"""Systems beside each other, from given answers."""

import numpy as np
import pytest

from molora_jax.config import UserError
from molora_jax.evaluation.comparison import Comparison, difference, table


def _run(ours, theirs, sets=("a", "b")):
    split = lambda values: {sets[0]: np.array(values[:3], bool), sets[1]: np.array(values[3:], bool)}
    ids = {sets[0]: ("1", "2", "3"), sets[1]: ("4", "5")}
    return Comparison(ids, {"ours": split(ours), "theirs": split(theirs)}, {"ours": 1.0, "theirs": 2.0})


RUNS = [_run([1, 1, 0, 1, 1], [1, 0, 0, 0, 1]), _run([1, 1, 1, 0, 1], [0, 0, 1, 0, 1])]


def test_a_difference_is_of_the_means_over_seeds_of_each_question():
    got = difference(RUNS, "ours", "theirs", ["a", "b"])
    assert got.mean == pytest.approx((0.5 + 1 + 0 + 0.5 + 0) / 5)
    assert got.n == 5
    assert difference(RUNS, "ours", "theirs", ["b"]).mean == pytest.approx(0.25)
    assert RUNS[0].difference("ours", "theirs", ["a"]).mean == pytest.approx(1 / 3)


def test_runs_on_other_questions_are_refused():
    other = Comparison(RUNS[0].sets | {"a": ("7", "8", "9")}, RUNS[0].right, {})
    with pytest.raises(UserError, match="got runs on different questions"):
        difference([RUNS[0], other], "ours", "theirs", ["a"])


def test_the_table():
    lines = table(RUNS).splitlines()
    assert lines[0] == "| system | a | b |"
    assert lines[2] == "| ours | 83.3 ± 23.6 | 75.0 ± 35.4 |"
    assert table(RUNS[:1]).splitlines()[3].startswith("| theirs | 33 % (")


def test_values_and_back():
    back = Comparison.of(RUNS[0].values)
    assert back.sets == RUNS[0].sets
    assert all(np.array_equal(back.right[s][n], v) for s, own in RUNS[0].right.items() for n, v in own.items())
