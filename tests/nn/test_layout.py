"""How tokens fall into rows, against loops that place them one by one."""

import jax
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from molora_jax.nn.layout import NOWHERE, dense, ragged

PAGE = 3
run = jax.jit(ragged, static_argnames=("tokens", "tile", "page_size"))


def place(starts, lengths, tables, tokens, tile):
    """The same layout by a loop over rows and tokens: per token, and per tile of a row."""
    flat, tiles = [], []
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        for i in range(length):
            position = start + i
            if i % tile == 0:
                tiles.append((b, []))
            tiles[-1][1].append((len(flat), position))
            page = [table[b][position // PAGE] for table in tables]
            writes = [p * PAGE + position % PAGE for p in page]
            flat.append((b, position, writes, len(tiles) - 1, len(tiles[-1][1]) - 1))
    assert len(flat) <= tokens
    return flat, tiles


@st.composite
def batches(draw):
    """Shapes from a small set, so that few programs are compiled, and any filling of them."""
    batch, tokens, tile = draw(st.sampled_from([(1, 1, 1), (3, 5, 1), (2, 6, 4), (4, 9, 4), (5, 16, 16)]))
    left, lengths = tokens, []
    for _ in range(batch):
        lengths.append(draw(st.integers(0, left)))
        left -= lengths[-1]
    order = draw(st.permutations(range(batch)))
    starts = draw(st.lists(st.integers(0, 11), min_size=batch, max_size=batch))
    return tokens, tile, starts, [lengths[i] for i in order]


@settings(max_examples=80)
@given(batches(), st.integers(0, 99))
@example((16, 16, [0] * 5, [0] * 5), 0)  # nobody
@example((6, 4, [7, 0], [5, 1]), 0)  # as many tiles as the static bound allows
@example((9, 4, [0, 5, 0, 2], [1, 1, 1, 6]), 0)
def test_ragged_places_every_token_like_a_loop(batch, seed):
    tokens, tile, starts, lengths = batch
    tables = np.random.default_rng(seed).permutation(2 * len(starts) * 11).reshape(2, len(starts), 11)
    rows = (np.array(value, np.int32) for value in (starts, lengths, tables))
    got = jax.device_get(run(*rows, tokens=tokens, tile=tile, page_size=PAGE))
    flat, tiles = place(starts, lengths, tables, tokens, tile)
    n = len(flat)
    np.testing.assert_array_equal(got.rows, [f[0] for f in flat] + [len(starts)] * (tokens - n))
    np.testing.assert_array_equal(got.positions, [f[1] for f in flat] + [0] * (tokens - n))
    np.testing.assert_array_equal(got.token_positions, got.positions)
    np.testing.assert_array_equal(got.writes[:, :n], np.array([f[2] for f in flat], int).reshape(n, 2).T)
    np.testing.assert_array_equal(got.writes[:, n:], NOWHERE)
    np.testing.assert_array_equal(got.lane_of_token[:n], [f[3] * tile + f[4] for f in flat])
    lanes, positions = np.full(got.lanes.shape, tokens), np.full(got.lanes.shape, -1)
    for j, (b, members) in enumerate(tiles):
        assert got.tile_rows[j] == b
        for i, (token, position) in enumerate(members):
            lanes[j, i], positions[j, i] = token, position
    np.testing.assert_array_equal(got.lanes, lanes)
    np.testing.assert_array_equal(got.lane_positions, positions)
    for leaf in (got.tile_rows, got.lane_of_token):  # what is gathered for padding must be in range
        assert int(leaf.min()) >= 0
    assert int(got.tile_rows.max()) < len(starts)
    assert int(got.lane_of_token.max()) < got.lanes.size


@settings(max_examples=60)
@given(st.data())
def test_dense_counts_the_valid_tokens_of_a_segment(data):
    rows, length = data.draw(st.sampled_from([(1, 1), (2, 7), (3, 12)]))
    bits = st.lists(st.booleans(), min_size=length, max_size=length)
    valid = np.array(data.draw(st.lists(bits, min_size=rows, max_size=rows)))
    numbers = st.lists(st.integers(0, 2), min_size=length, max_size=length)  # segments may even interleave
    segments = np.array(data.draw(st.lists(numbers, min_size=rows, max_size=rows)))
    got = jax.device_get(dense(rows, length, valid=valid, segments=segments))
    for b in range(rows):
        seen = {}
        for t in range(length):
            if valid[b, t]:
                assert got.positions[b, t] == seen.get(segments[b, t], 0)
                seen[segments[b, t]] = seen.get(segments[b, t], 0) + 1


def test_dense_defaults_and_given_positions():
    np.testing.assert_array_equal(dense(2, 3).token_positions, [0, 1, 2, 0, 1, 2])
    given_positions = dense(1, 3, positions=np.array([[4, 9, 2]]), valid=np.array([[True, False, True]]))
    np.testing.assert_array_equal(given_positions.token_positions, [4, 9, 2])
