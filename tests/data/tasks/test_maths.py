"""Plain numbers are compared exactly; the rest goes to math-verify in processes that do not outlive their time."""

import threading

import pytest

from molora_jax.config import UserError
from molora_jax.data.tasks import maths


@pytest.mark.parametrize(
    ("text", "value"),
    [("18", 18), ("18.0", 18), ("$1,234.", 1234), (" -3.50 ", -3.5), ("+7", 7), (".5", 0.5), ("0.10", 0.1)],
)
def test_numbers(text, value):
    assert float(maths.number(text)) == value


@pytest.mark.parametrize("text", ["", "12,34", "1e5", "1/2", "nan", "inf", "12 apples", "1.2.3", "²", "9" * 200, "."])
def test_no_numbers(text):
    assert maths.number(text) is None


def test_numbers_need_no_process(monkeypatch):
    monkeypatch.setattr(maths, "default_pool", lambda: pytest.fail("a pool for plain numbers"))
    pairs = [("18", "18.0"), ("18", "$18"), ("1234", "1,234"), ("18", "19"), ("0.1", "0.10"), ("x", "x")]
    assert maths.equal(pairs) == [True, True, True, False, True, True]


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setattr(maths.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="math-verify is missing; pip install"):
        maths.Pool(workers=1, seconds=1.0)


@pytest.fixture(scope="module")
def pool():
    pytest.importorskip("math_verify", reason="math-verify is missing; pip install 'molora_jax[train]'")
    pool = maths.Pool(workers=1, seconds=10.0)
    yield pool
    pool.close()


def test_expressions(pool, monkeypatch):
    monkeypatch.setattr(maths, "default_pool", lambda: pool)
    same = [("1/2", "\\frac{1}{2}"), ("0.5", "1/2"), ("x^2-1", "(x-1)(x+1)"), ("(3, \\frac{\\pi}{2})", "(3, \\pi/2)")]
    other = [("1/2", "1/3"), ("5", "five"), ("x^2", "x^3"), ("5", ""), ("5", "\\frac{")]
    mixed = [pair for pairs in zip(same, other, strict=False) for pair in pairs] + [("7", "7.0")]
    assert maths.equal(mixed) == [True, False] * 4 + [True]
    assert pool.equal(other) == [False] * 5


def test_the_relation_is_not_symmetric(pool):
    assert pool.equal([("1<x<2", "(1,2)"), ("(1,2)", "1<x<2")]) == [True, False]


def test_it_works_outside_of_the_main_thread(pool):
    results = []
    thread = threading.Thread(target=lambda: results.extend(pool.equal([("1/2", "0.5")])))
    thread.start()
    thread.join(60)
    assert results == [True]


def test_what_never_ends_is_different_and_the_process_is_replaced(pool):
    (worker,) = pool._all
    assert pool.equal([("2", "1+1")]) == [True]
    first = worker._process.pid
    pool._seconds = 0.5
    try:
        assert pool.equal([("2", "9^{9^{9^{9}}}")]) == [False]
    finally:
        pool._seconds = 10.0
    assert pool.equal([("2", "1+1")]) == [True]
    assert worker._process.pid != first


def test_a_process_that_dies_is_replaced(pool):
    (worker,) = pool._all
    assert pool.equal([("2", "1+1")]) == [True]
    worker._process.kill()
    worker._process.wait()
    assert pool.equal([("2", "1+1")]) == [True]
