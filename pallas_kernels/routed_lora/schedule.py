"""Tokens sorted by expert and cut into tiles of one expert each, with static bounds on everything."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import round_up


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """Tiles of a token list. Sorted rows begin with the tokens of no expert, then come the experts in order.

    Attributes:
      order: [N], the token at each sorted row.
      row: [N], the sorted row of each token: the inverse of `order`.
      slot: [N], the row of each token in the list of all tiles laid end to end; 0 for tokens of no expert.
      expert: [tiles], the expert of each tile; tiles past `count` repeat the last expert.
      start: [tiles], the sorted row each tile begins at; a tile is full or the last one of its expert.
      size: [tiles], how many of its rows are the expert's.
      count: how many tiles are used, known only at run time.
    """

    order: jax.Array
    row: jax.Array
    slot: jax.Array
    expert: jax.Array
    start: jax.Array
    size: jax.Array
    count: jax.Array


def max_tiles(tokens: int, experts: int, tile: int) -> int:
    """No list of `tokens` ids makes more tiles: each expert in use wastes less than one."""
    used = min(experts, tokens)
    return min(round_up(tokens, tile) // tile + used, tokens)


def sort(ids, experts: int, tile: int) -> Schedule:
    """The schedule of ids [N]; ids outside [0, experts) are tokens of no expert. Stable, so it is deterministic."""
    n = ids.shape[0]
    ids = jnp.where((ids < 0) | (ids >= experts), -1, ids)
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    counts = jnp.sum(ids[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    first = n - jnp.cumsum(counts[::-1])[::-1]
    tiles = -(-counts // tile)
    end = jnp.cumsum(tiles)
    t = jnp.arange(max_tiles(n, experts, tile), dtype=jnp.int32)
    expert = jnp.sum(jnp.minimum(t, end[-1] - 1)[:, None] >= end, axis=1, dtype=jnp.int32)
    within = (t - (end - tiles)[expert]) * tile
    size = jnp.clip(counts[expert] - within, 0, tile)
    row = jnp.argsort(order).astype(jnp.int32)
    slot = jnp.where(ids < 0, 0, (end - tiles)[ids] * tile + row - first[ids])
    return Schedule(order, row, slot, expert, first[expert] + within, size, end[-1])


def padded(plan: Schedule, x, tile: int):
    """x [N …] laid out in tiles, [tiles, tile, …]; the rows that fill a tile up repeat some token."""
    row = plan.start[:, None] + jnp.arange(tile)
    return x[plan.order[jnp.clip(row, 0, len(x) - 1)]]


def take(x, start, rows: int):
    return lax.dynamic_slice_in_dim(x, start, rows)
