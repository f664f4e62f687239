"""Dense and paged attention, against softmax in fp64 numpy, one query at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.nn.attention import BLOCK, KVTable, dense_attention, paged_attention, write_kv
from molora_jax.nn.layout import dense, ragged
from tests.numerics import assert_close

# Here tokens come first, [N, H, d]; the decoder's way, tokens last, is only at the calls.
D = 4
SCALE = 0.7


def attend(q, keys, values):
    """One query [H, d] over the keys and values [S, K, d] that it sees."""
    out = np.zeros_like(q)
    for h in range(len(q)):
        k = h * keys.shape[1] // len(q)
        scores = SCALE * keys[:, k] @ q[h]
        weights = np.exp(scores - scores.max())
        out[h] = weights / weights.sum() @ values[:, k]
    return out


def normal(rng, *shape, dtype=jnp.float32):
    x = np.asarray(rng.standard_normal(shape), dtype)
    return x, x.astype(np.float64)


columns = lambda x: np.moveaxis(x, 0, -1)
tokens_first = lambda x: jnp.moveaxis(x, -1, 0)
run_dense = jax.jit(dense_attention)


def dense_layout(rng, kind):
    """Rows whose real tokens lie anywhere; `packed` ones hold up to three documents, here and there mixed up."""
    rows, length = {"one": (1, 1), "row": (1, 13), "pads": (4, 13), "packed": (3, 13)}[kind]
    valid = rng.random((rows, length)) < 0.6 if kind in ("pads", "packed") else np.ones((rows, length), bool)
    valid[0, 3:] |= kind == "packed"
    segments = rng.integers(0, 3, (rows, length)) if kind == "packed" else np.zeros((rows, length), int)
    return dense(rows, length, valid=valid, segments=segments)


@pytest.mark.parametrize("heads", [(6, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("kind", ["one", "row", "pads", "packed"])
@pytest.mark.parametrize("window", [0, 1, 4])
def test_dense_attention_sees_what_it_should(heads, kind, window):
    rng = np.random.default_rng(0)
    layout = dense_layout(rng, kind)
    B, T = layout.shape
    H, K = heads
    (q, q64), (k, k64), (v, v64) = (normal(rng, B * T, n, D) for n in (H, K, K))
    got = np.asarray(run_dense(*map(columns, (q, k, v)), layout, window=np.int32(window), scale=SCALE))
    got = tokens_first(got)
    assert np.isfinite(got).all()
    valid, segments, positions = (np.asarray(x) for x in (layout.valid, layout.segments, layout.positions))
    want = []
    for b, t in np.argwhere(valid):
        seen = [
            b * T + s
            for s in range(T)
            if valid[b, s]
            and segments[b, s] == segments[b, t]
            and positions[b, s] <= positions[b, t]
            and (not window or positions[b, t] - positions[b, s] < window)
        ]
        want.append(attend(q64[b * T + t], k64[seen], v64[seen]))
    assert_close(got[valid.reshape(-1)], np.array(want).reshape(-1, H, D))


class Paged:
    """Rows with a past, in a table whose other rows are all NaN."""

    def __init__(self, starts, lengths, *, heads, page, ring=0, dtype=jnp.float32, seed=0):
        rng = np.random.default_rng(seed)
        self.starts, self.lengths, self.page = starts, lengths, page
        H, self.K = heads
        ends = [s + n for s, n in zip(starts, lengths, strict=True)]
        width = -(-max(*ends, 150) // page)
        pages = rng.permutation(width * len(starts) + 3)[: width * len(starts)].reshape(-1, width)
        if ring:
            pages = np.stack([np.resize(own[:ring], width) for own in pages])
        self.base = 5 * page
        self.tables = np.stack([np.full_like(pages, -1), pages])  # the first kind of layer must not be looked at
        rows = 2 * self.base + (width * len(starts) + 3) * page
        self.past = np.full((rows, self.K * 2 * D), np.nan, dtype)
        self.kv = [normal(rng, 2, end, self.K, D, dtype=dtype) for end in ends]
        for b, start in enumerate(starts):
            for position in range(start):
                self.past[self.row(b, position)] = self.stored(self.kv[b][0][:, position])
        new = [kv[0][:, start:] for kv, start in zip(self.kv, starts, strict=True)]
        self.new = np.concatenate(new, axis=1)
        self.q, self.q64 = normal(rng, len(self.new[0]), H, D, dtype=dtype)

    def row(self, b, position):
        return self.base + self.tables[1, b, position // self.page] * self.page + position % self.page

    def stored(self, kv):
        """A row of the table: each head's key, then its value."""
        return np.concatenate([np.concatenate([k, v]) for k, v in zip(*kv, strict=True)])

    def run(self, tokens, tile, window):
        """Attention out of the jitted pair of write and read, the padding's dropped, and the table after."""
        pad = lambda x: columns(np.concatenate([x, np.ones((tokens - len(x), *x.shape[1:]), x.dtype)]))
        rows = [np.array(x, np.int32) for x in (self.starts, self.lengths, self.tables)]
        shape = dict(tokens=tokens, tile=tile, page_size=self.page)
        out, table = _write_and_attend(
            pad(self.q), *map(pad, self.new), KVTable(self.past), rows, np.int32(self.base), np.int32(window), **shape
        )
        out = np.asarray(tokens_first(out))
        assert np.isfinite(out.astype(np.float32)).all()  # padding included
        return out[: len(self.q)], table.rows

    def want(self, window):
        out, nth = [], 0
        for b, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            for position in range(start, start + length):
                keys, values = self.kv[b][1][:, max(0, position + 1 - window) if window else 0 : position + 1]
                out.append(attend(self.q64[nth], keys, values))
                nth += 1
        return np.array(out)


@functools.partial(jax.jit, static_argnames=("tokens", "tile", "page_size"))
def _write_and_attend(q, k, v, table, rows, base, window, **shape):
    layout = ragged(*rows, **shape)
    table = write_kv(table, k, v, layout, kind=1, base=base)
    return paged_attention(q, table, layout, kind=1, base=base, window=window, scale=SCALE), table


FAR = 2 * BLOCK + 5  # several turns of the page loop


@pytest.mark.parametrize("window", [0, 1, 6, BLOCK + 9])
@pytest.mark.parametrize(
    ("tile", "lengths", "page"),
    [
        (1, (1, 1, 1, 0), 16),
        (1, (3, 0, 2, 1), 3),
        (4, (1, 9, 0, 4), 3),
        (4, (1, 9, 0, 4), 100),  # longer than a block
        (16, (7, 0, 0, 3), 16),
    ],
)
def test_paged_attention_sees_pages_as_if_they_were_rows(window, tile, lengths, page):
    batch = Paged((0, 7, FAR, BLOCK - 1), lengths, heads=(6, 2), page=page)
    got, _ = batch.run(17, tile, window)
    assert_close(got, batch.want(window))


@pytest.mark.parametrize("window", [1, 6, 40])
def test_the_page_loop_begins_where_the_first_window_does(window):
    """The first position that anybody sees is the last of the first block, and the first of the second."""
    for first in (BLOCK - 1, BLOCK):
        start = first + window - 1
        batch = Paged((start, start + 30, 0), (2, 1, 0), heads=(4, 2), page=16)
        got, _ = batch.run(8, 4, window)
        assert_close(got, batch.want(window))


@pytest.mark.parametrize("heads", [(3, 3), (4, 1)])
def test_paged_attention_groups_heads(heads):
    batch = Paged((2, 70), (3, 5), heads=heads, page=5)
    got, _ = batch.run(8, 4, 0)
    assert_close(got, batch.want(0))


@pytest.mark.parametrize("length", [1, 6])
def test_paged_attention_of_one_row(length):
    batch = Paged((0,), (length,), heads=(2, 2), page=4)
    got, _ = batch.run(length, 4 if length > 1 else 1, 0)
    assert_close(got, batch.want(0))


@pytest.mark.parametrize("start", [0, 11, FAR])
@pytest.mark.parametrize(("window", "chunk", "page"), [(7, 5, 3), (6, 1, 4), (1, 4, 4), (70, 9, 16)])
def test_a_ring_of_pages_is_as_good_as_all_of_them(start, window, chunk, page):
    ring = -(-(window + chunk) // page) + 1
    batch = Paged((start, 2), (chunk, 1), heads=(4, 2), page=page, ring=ring)
    got, _ = batch.run(chunk + 1, 4 if chunk > 1 else 1, window)
    assert_close(got, batch.want(window))


def test_nobody_gives_finite_numbers():
    batch = Paged((4, 0), (0, 0), heads=(4, 2), page=4)
    for tile in (1, 4):
        _, table = batch.run(8, tile, 0)
        np.testing.assert_array_equal(table, batch.past)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_write_kv_touches_the_rows_of_its_tokens_alone(dtype):
    batch = Paged((0, 7, FAR), (4, 0, 2), heads=(4, 2), page=3, dtype=dtype)
    _, after = batch.run(9, 4, 0)
    want, nth = batch.past.copy(), 0
    for b, (start, length) in enumerate(zip(batch.starts, batch.lengths, strict=True)):
        for position in range(start, start + length):
            want[batch.row(b, position)] = batch.stored(batch.new[:, nth])
            nth += 1
    np.testing.assert_array_equal(after.astype(np.float32), want.astype(np.float32))


def test_paged_attention_of_bfloat16_accumulates_in_float32():
    batch = Paged((1500,), (1,), heads=(2, 1), page=16, dtype=jnp.bfloat16)
    got, _ = batch.run(1, 1, 0)
    assert got.dtype == jnp.bfloat16
    assert_close(got, batch.want(0), "model")
    even = functools.partial(np.full_like, fill_value=1)  # a mean of ones is one, in however many blocks
    batch.past[:] = np.where(np.isnan(batch.past), np.nan, 1)
    batch.new, batch.q = even(batch.new), even(batch.q)
    np.testing.assert_array_equal(np.asarray(batch.run(1, 1, 0)[0], np.float32), 1)
