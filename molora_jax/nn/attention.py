"""Causal grouped-query attention: over a dense rectangle, and over the pages of a KV table."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from molora_jax.nn.layout import Dense, Ragged
from molora_jax.typing import Array, Float, Int

BLOCK = 64
"""Positions that one turn of the page loop reads."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["keys", "values"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class KVTable:
    """Keys and values of all layers and requests: one row a token and layer, [rows, K·d] each.

    Every access is a computed row index, so that XLA updates the table in place on every platform.
    """

    keys: Float[Array, "rows Kd"]
    values: Float[Array, "rows Kd"]


def dense_attention(
    q: Float[Array, "N H d"],
    k: Float[Array, "N K d"],
    v: Float[Array, "N K d"],
    layout: Dense,
    *,
    window: Int[Array, ""] | int,
    scale: float,
) -> Float[Array, "N H d"]:
    """softmax(q kᵀ · scale) v within each row (Vaswani et al. 2017, §3.2.1); `window` 0 sees the whole row."""
    B, T = layout.shape
    _, H, d = q.shape
    K = k.shape[1]
    acc = jnp.promote_types(q.dtype, jnp.float32)
    pos, seg = layout.positions, layout.segments
    seen = (pos[:, None, :] <= pos[:, :, None]) & (seg[:, None, :] == seg[:, :, None]) & layout.valid[:, None, :]
    seen &= (window == 0) | (pos[:, :, None] - pos[:, None, :] < window)
    q, k, v = q.reshape(B, T, K, H // K, d), k.reshape(B, T, K, d), v.reshape(B, T, K, d)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=acc) * scale
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(acc).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgts,bskd->btkgd", weights, v, preferred_element_type=acc)
    return out.reshape(B * T, H, d).astype(q.dtype)


def write_kv(
    table: KVTable, k: Float[Array, "N K d"], v: Float[Array, "N K d"], layout: Ragged, *, kind, base
) -> KVTable:
    """Stores the tokens' keys and values in the layer's share of the table, which begins at row `base`."""
    at = layout.writes[kind]
    at = jnp.where(at < jnp.iinfo(at.dtype).max, at + base, at)
    flat = lambda x: x.reshape(x.shape[0], -1).astype(table.keys.dtype)
    return KVTable(
        table.keys.at[at].set(flat(k), mode="drop", unique_indices=True),
        table.values.at[at].set(flat(v), mode="drop", unique_indices=True),
    )


def paged_attention(
    q: Float[Array, "N H d"], table: KVTable, layout: Ragged, *, kind, base, window: Int[Array, ""] | int, scale: float
) -> Float[Array, "N H d"]:
    """The same as `dense_attention` for queries whose keys lie in pages, their own included.

    Walks the positions in blocks with an online softmax (Milakov & Gimelshein 2018, alg. 3); the trip count is that of
    the longest row, so that a context's length is no static shape and short contexts cost little.
    """
    N, H, d = q.shape
    K = table.keys.shape[1] // d
    J, Q = layout.lanes.shape
    acc = jnp.promote_types(q.dtype, jnp.float32)
    q = q if Q == 1 else q.at[layout.lanes.reshape(-1)].get(mode="fill", fill_value=0)
    q = (q.astype(acc) * scale).astype(q.dtype).reshape(J, Q, K, H // K, d)
    pages = layout.tables[kind][layout.tile_rows]
    last = jnp.max(layout.lane_positions, axis=1)
    asked = jnp.where(layout.lane_positions < 0, jnp.iinfo(jnp.int32).max, layout.lane_positions)
    first = jnp.where(window == 0, 0, jnp.maximum(jnp.min(asked) - window + 1, 0)).astype(jnp.int32)

    def block(i, carry):
        top, total, out = carry
        at = i * BLOCK + jnp.arange(BLOCK)
        rows = base + pages[:, at // layout.page_size] * layout.page_size + at % layout.page_size
        k, v = table.keys[rows].reshape(J, BLOCK, K, d), table.values[rows].reshape(J, BLOCK, K, d)
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
    begin, end = first // BLOCK, jnp.max(last) // BLOCK + 1
    _, total, out = jax.lax.fori_loop(begin, end, block, init)
    out = (out / jnp.maximum(total, jnp.finfo(acc).tiny)[..., None]).astype(q.dtype)
    out = jnp.moveaxis(out, 3, 1).reshape(J * Q, H, d)
    return out if Q == 1 else out[layout.lane_of_token]
