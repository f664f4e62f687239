"""What accuracies say, and the intervals around them."""

import pytest

from molora_jax.evaluation.accuracy import Accuracy
from molora_jax.evaluation.testbed import table, written


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    # solutions of (p - right/n)² = z² p (1 - p) / n, found by bisection
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (8, 10, 0.4902, 0.9433), (10, 10, 0.7225, 1.0), (1, 1, 0.2065, 1)],
)
def test_interval(right, n, low, high):
    assert Accuracy(right, n).interval == pytest.approx((low, high), abs=1e-4)


def test_table_and_record_say_the_same():
    names = ("calc", "logic", "text", "list", "date")
    found = {"small": dict.fromkeys(names, Accuracy(0, 10)), "large": dict.fromkeys(names, Accuracy(8, 10))}
    lines = table(found).splitlines()
    assert lines[0] == "| domain | small | large |"
    assert lines[2] == "| calc | 0 % (0–28) | 80 % (49–94) |"
    assert [line.split()[1] for line in lines[2:]] == list(names)
    assert written(found["large"])["date"] == dict(right=8, n=10, share=0.8, low=0.4902, high=0.9433)
