"""Causal grouped-query attention: over a dense rectangle, and over the pages of a KV table."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from molora_jax.nn import splash
from molora_jax.nn.layout import NOWHERE, Dense, Ragged
from molora_jax.typing import Array, Float, Int

BLOCK, WIDE = 64, 256
"""Positions that one turn of the page loop reads, in whole pages: of every tile, and, if it is more, of all together.

A turn costs the same some 0.1 ms on a CPU, whatever it reads: one tile alone, as of a request that catches up on its
own, takes 0.65 × the time with 256, while sixteen take 1.2 × with 128.
"""
LONG = 1024
"""Tokens of a row up to which dense attention makes all its scores at once."""
QUERIES = 256
"""Queries at a time beyond that."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVTable:
    """Keys and values of all layers and requests: one row a token and layer.

    Every access is a computed index of a row or page, so that XLA updates the table in place on every platform.

    Attributes:
      rows: K heads, each with its key and then its value: [rows, K·2·d]. One read and one write serve both (a decode
        step's attention takes 0.6 × the time of two tables on a CPU), and columns shard by head.
    """

    rows: Float[Array, "rows K2d"]


def dense_attention(
    q: Float[Array, "H d N"],
    k: Float[Array, "K d N"],
    v: Float[Array, "K d N"],
    layout: Dense,
    *,
    window: Int[Array, ""] | int,
    scale: float,
    windows: tuple[int, ...] | None = None,
) -> Float[Array, "H d N"]:
    """softmax(q kᵀ · scale) v within each row (Vaswani et al. 2017, §3.2.1); `window` 0 sees the whole row.

    Scores of all pairs of a row longer than `LONG`, [B H T T], never exist: a TPU has a kernel (`nn.splash`), and
    elsewhere `QUERIES` queries go at a time, here and in the backward pass, which computes their scores again.

    Args:
      windows: all values that a traced `window` may take; without them the kernel has to be left out.
    """
    B, T = layout.shape
    H, d, _ = q.shape
    K, acc = k.shape[0], jnp.promote_types(q.dtype, jnp.float32)
    q = (q.astype(acc) * scale).astype(q.dtype)
    if T > LONG and windows and splash.runs_here(q.dtype):
        rows = (x.reshape(-1, d, B, T).transpose(2, 0, 3, 1) for x in (q, k, v))
        out = splash.splash_attention(*rows, layout, window=window, windows=windows)
        return out.transpose(1, 3, 0, 2).reshape(H, d, B * T)
    q = q.reshape(K, H // K, d, B, T).transpose(3, 0, 2, 1, 4)
    k, v = (x.reshape(K, d, B, T).transpose(2, 0, 1, 3) for x in (k, v))
    attend = functools.partial(_attend, k, v, layout, window)
    if T <= LONG:
        out = attend(q, layout.positions, layout.segments)
    else:
        blocks = (_blocks(leaf) for leaf in (q, layout.positions, layout.segments))
        step = jax.checkpoint(lambda block: attend(*block), prevent_cse=False)  # the body of a scan needs no barrier
        out = jnp.moveaxis(jax.lax.map(step, tuple(blocks)), 0, -2)
        out = out.reshape(*out.shape[:-2], -1)[..., :T]
    return out.transpose(1, 3, 2, 0, 4).reshape(H, d, B * T)


def _attend(k, v, layout: Dense, window, q, positions, segments) -> Float[Array, "B K d G T"]:
    """What some queries [B K d G T] of the layout's rows see, given their positions and segments [B T].

    Keys are rows and queries columns, so that no product here or in the backward pass transposes the scores: on a CPU
    the two passes take 0.55 × the time of the other way round.
    """
    B, K, d, G, T = q.shape
    acc, S = jnp.promote_types(q.dtype, jnp.float32), k.shape[-1]
    own, other = positions[:, None, :], layout.positions[:, :, None]
    seen = (other <= own) & (layout.segments[:, :, None] == segments[:, None, :]) & layout.valid[:, :, None]
    seen &= (window == 0) | (own - other < window)
    scores = jnp.einsum("bkds,bkdn->bksn", k, q.reshape(B, K, d, G * T), preferred_element_type=acc)
    scores = jnp.where(seen[:, None, :, None], scores.reshape(B, K, S, G, T), jnp.finfo(acc).min)
    scores = scores.reshape(B, K, S, G * T)
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=2, keepdims=True)))
    out = jnp.einsum("bkds,bksn->bkdn", v, weights.astype(v.dtype), preferred_element_type=acc)
    out = out / jnp.sum(weights, axis=2, keepdims=True)
    return out.reshape(B, K, d, G, T).astype(q.dtype)


def _blocks(leaf: Array) -> Array:
    """[... T] as [blocks ... QUERIES]; the last is filled up with zeros."""
    leaf = jnp.pad(leaf, [(0, 0)] * (leaf.ndim - 1) + [(0, -leaf.shape[-1] % QUERIES)])
    return jnp.moveaxis(leaf.reshape(*leaf.shape[:-1], -1, QUERIES), -2, 0)


def write_kv(
    table: KVTable, k: Float[Array, "K d N"], v: Float[Array, "K d N"], layout: Ragged, *, kind, base
) -> KVTable:
    """Stores the tokens' keys and values in the layer's share of the table, which begins at row `base`."""
    at = layout.writes[kind]
    at = jnp.where(at < NOWHERE, at + base, NOWHERE)
    rows = jnp.stack([k, v], axis=1).reshape(-1, at.size).T
    return KVTable(table.rows.at[at].set(rows.astype(table.rows.dtype), mode="drop", unique_indices=True))


def paged_attention(
    q: Float[Array, "H d N"], table: KVTable, layout: Ragged, *, kind, base, window: Int[Array, ""] | int, scale: float
) -> Float[Array, "H d N"]:
    """The same as `dense_attention` for queries whose keys lie in pages, their own included.

    Walks the positions in blocks with an online softmax (Milakov & Gimelshein 2018, alg. 3); the trip count is that of
    the longest row, so that a context's length is no static shape and short contexts cost little.
    """
    H, d, N = q.shape
    K = table.rows.shape[1] // (2 * d)
    J, Q = layout.lanes.shape
    acc = jnp.promote_types(q.dtype, jnp.float32)
    q = (q.astype(acc) * scale).astype(q.dtype).reshape(H * d, N).T
    q = q if Q == 1 else q.at[layout.lanes.reshape(-1)].get(mode="fill", fill_value=0)
    q = q.reshape(J, Q, K, H // K, d)
    pages = base // layout.page_size + layout.tables[kind][layout.tile_rows]
    per_block = max(max(BLOCK, WIDE // J) // layout.page_size, 1)
    span = per_block * layout.page_size
    last = jnp.max(layout.lane_positions, axis=1)
    asked = jnp.where(layout.lane_positions < 0, jnp.iinfo(jnp.int32).max, layout.lane_positions)
    first = jnp.where(window == 0, 0, jnp.maximum(jnp.min(asked) - window + 1, 0)).astype(jnp.int32)

    def block(i, carry):
        top, total, out = carry
        at = i * span + jnp.arange(span)
        stored = table.rows.reshape(-1, layout.page_size, K * 2 * d)  # outside the loop, XLA would copy the table
        read = stored[pages[:, i * per_block + jnp.arange(per_block)]].reshape(J, span, K, 2, d)
        k, v = read[:, :, :, 0], read[:, :, :, 1]
        v = jnp.where((at <= last[:, None])[:, :, None, None], v, 0)  # unwritten rows may hold anything, even NaN
        pos = layout.lane_positions[:, :, None]
        seen = (at <= pos) & ((window == 0) | (at > pos - window))
        scores = jnp.einsum("jqkgd,jskd->jkgqs", q, k, preferred_element_type=acc)
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        fade = jnp.exp(top - new_top)
        total = total * fade + jnp.sum(weights, axis=-1)
        seen_values = jnp.einsum("jkgqs,jskd->jkgqd", weights.astype(v.dtype), v, preferred_element_type=acc)
        return new_top, total, out * fade[..., None] + seen_values

    shape = (J, K, H // K, Q)
    lowest = jnp.full(shape, jnp.finfo(acc).min, acc)  # finite: an empty tile must not give NaN
    init = (lowest, jnp.zeros(shape, acc), jnp.zeros((*shape, d), acc))
    begin, end = first // span, jnp.max(last) // span + 1
    _, total, out = jax.lax.fori_loop(begin, end, block, init)
    out = (out / jnp.maximum(total, jnp.finfo(acc).tiny)[..., None]).astype(q.dtype)
    out = jnp.moveaxis(out, 3, 1).reshape(J * Q, H * d)
    out = out if Q == 1 else out[layout.lane_of_token]
    return out.T.reshape(H, d, N)
