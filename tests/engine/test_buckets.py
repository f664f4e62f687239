"""Buckets cover every load, in order, and waste little."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molora_jax.engine import buckets

rows = st.integers(1, 300)
tokens = st.integers(1, 5000)


@given(rows, st.integers(1, 64), st.data())
def test_decode_buckets_cover_with_less_than_half_to_waste(most, steps, data):
    made = buckets.decode_buckets(most, steps)
    assert [b.rows for b in made] == sorted({b.rows for b in made})
    assert all((b.tokens, b.tile, b.steps) == (b.rows, 1, steps) for b in made)
    assert made[-1].rows == most
    n = data.draw(st.integers(1, most))
    bucket = buckets.pick(made, n, n)
    assert n <= bucket.rows < 2 * n
    if n < most:
        assert buckets.pick(made, n + 1, n + 1).rows >= bucket.rows


@given(rows, tokens, st.data())
def test_prefill_buckets_cover_and_waste_little_of_long_prompts(most, chunk, data):
    made = buckets.prefill_buckets(most, chunk)
    assert [b.tokens for b in made] == sorted({b.tokens for b in made})
    assert made[-1].tokens == chunk
    for b in made:
        assert b.rows == min(most, 8)
        assert b.steps == 1
        assert 1 <= b.tile <= b.tokens
    n = data.draw(st.integers(1, 2 * chunk))
    bucket = buckets.pick(made, 1, n)
    assert bucket.tokens >= min(n, chunk)
    assert bucket.tokens <= max(32, 4 * n if n <= buckets.SHORT // 2 else 2 * n + 1)
    assert buckets.pick(made, 1, n + 1).tokens >= bucket.tokens


@pytest.mark.parametrize(
    ("limit", "want"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 8, 9))]
)
def test_powers(limit, want):
    assert buckets.powers(limit) == want
