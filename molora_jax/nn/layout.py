"""How a flat list of N tokens falls into rows; the linear layers never need to know.

`Dense` is a [B, T] rectangle that attends to itself: training, scoring, encoding.
`Ragged` is rows of unequal length that write to and read from a paged KV table: serving.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from molora_jax.typing import Array, Bool, Int


@functools.partial(
    jax.tree_util.register_dataclass, meta_fields=["shape"], data_fields=["positions", "valid", "segments"]
)
@dataclasses.dataclass(frozen=True)
class Dense:
    """A rectangle of rows.

    Attributes:
      shape: (B, T); N = B·T, row-major.
      positions: rotary positions; a query sees the keys of its row and segment at its own or a lower position.
      valid: False for pads, wherever they lie; nothing sees them.
      segments: packed documents of one row do not see each other.
    """

    shape: tuple[int, int]
    positions: Int[Array, "B T"]
    valid: Bool[Array, "B T"]
    segments: Int[Array, "B T"]

    @property
    def token_positions(self) -> Int[Array, "N"]:
        return self.positions.reshape(-1)


def dense(
    rows: int,
    length: int,
    *,
    positions: Int[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
) -> Dense:
    """A `Dense` layout; positions count the valid tokens of a segment from 0 when they are not given."""
    shape = (rows, length)
    valid = jnp.ones(shape, bool) if valid is None else jnp.asarray(valid)
    segments = jnp.zeros(shape, jnp.int32) if segments is None else jnp.asarray(segments)
    if positions is None:
        same = (segments[:, :, None] == segments[:, None, :]) & valid[:, None, :]
        before = jnp.tri(length, k=-1, dtype=bool)
        positions = jnp.sum(same & before, axis=-1, dtype=jnp.int32)
    return Dense(shape, jnp.asarray(positions), valid, segments)


_RAGGED = ["positions", "rows", "slots", "tables", "writes", "lanes", "lane_of_token", "lane_positions", "tile_rows"]


@functools.partial(jax.tree_util.register_dataclass, meta_fields=["page_size"], data_fields=_RAGGED)
@dataclasses.dataclass(frozen=True)
class Ragged:
    """Rows of unequal length, cut into tiles of at most Q tokens of one row; only attention sees the tiles.

    Made by `ragged`. J is the number of tiles; with Q = 1 a tile is a token (decoding).

    Attributes:
      page_size: rows of the KV table that a page holds.
      positions: of each token in its request.
      rows: of each token; B for padding.
      slots: of each row in what is kept by request beside the pages; beyond any for rows that only fill up.
      tables: page tables of the B rows, one a kind of layer.
      writes: where each token's key and value go within a layer's share of the KV table, one a kind of layer;
        beyond the end of any table for padding, so that the write is dropped.
      lanes: flat index of the token in each lane of a tile; N where the lane is empty.
      lane_of_token: flat index into the J·Q lanes.
      lane_positions: position of the token in each lane; -1 where it is empty.
      tile_rows: row of each tile.
    """

    page_size: int
    positions: Int[Array, "N"]
    rows: Int[Array, "N"]
    slots: Int[Array, "B"]
    tables: Int[Array, "kinds B P"]
    writes: Int[Array, "kinds N"]
    lanes: Int[Array, "J Q"]
    lane_of_token: Int[Array, "N"]
    lane_positions: Int[Array, "J Q"]
    tile_rows: Int[Array, "J"]

    @property
    def token_positions(self) -> Int[Array, "N"]:
        return self.positions


NOWHERE = jnp.iinfo(jnp.int32).max
"""A row beyond every table: a scatter with mode="drop" ignores it."""


def ragged(
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    tables: Int[Array, "kinds B P"],
    *,
    tokens: int,
    tile: int,
    page_size: int,
    slots: Int[Array, "B"] | None = None,
) -> Ragged:
    """Lays `lengths[b]` tokens of row b, from position `starts[b]` on, one row after another into a list of `tokens`.

    Example: starts (5, 0), lengths (1, 3), tokens 6 gives rows 0 1 1 1 2 2 and positions 5 0 1 2 0 0;
    with tile 2 the lanes are (0 -)(1 2)(3 -) and empty tiles to the most that B rows can need, (tokens - B)/tile + B.
    The sum of `lengths` must not exceed `tokens`. Rows are in slots of their own numbers unless `slots` are given.
    """
    batch = starts.shape[0]
    ends = jnp.cumsum(lengths)
    flat = jnp.arange(tokens, dtype=jnp.int32)
    rows = jnp.searchsorted(ends, flat, side="right").astype(jnp.int32)
    real = rows < batch
    row = jnp.minimum(rows, batch - 1)
    nth = flat - (ends - lengths)[row]
    positions = jnp.where(real, starts[row] + nth, 0)
    tables = jnp.asarray(tables)
    page = tables[:, row, positions // page_size]
    writes = jnp.where(real, page * page_size + positions % page_size, NOWHERE)

    tiles_of_row = -(-lengths // tile)
    tile_ends = jnp.cumsum(tiles_of_row)
    tile_of_token = (tile_ends - tiles_of_row)[row] + nth // tile
    most = min(batch, tokens)  # rows, each of which may end in a tile that is not full
    tiles = tokens if tile == 1 else most + (tokens - most) // tile
    lane_of_token = jnp.where(real, tile_of_token * tile + nth % tile, 0)
    lanes = jnp.full((tiles * tile,), tokens, jnp.int32)
    lanes = lanes.at[jnp.where(real, lane_of_token, NOWHERE)].set(flat, mode="drop")
    lane_positions = jnp.where(lanes < tokens, positions[jnp.minimum(lanes, tokens - 1)], -1)
    tile_rows = jnp.searchsorted(tile_ends, jnp.arange(tiles), side="right")
    return Ragged(
        page_size=page_size,
        positions=positions,
        rows=rows,
        slots=jnp.arange(batch, dtype=jnp.int32) if slots is None else slots,
        tables=tables,
        writes=writes,
        lanes=lanes.reshape(tiles, tile),
        lane_of_token=lane_of_token,
        lane_positions=lane_positions.reshape(tiles, tile),
        tile_rows=jnp.minimum(tile_rows, batch - 1).astype(jnp.int32),
    )


Layout = Dense | Ragged
