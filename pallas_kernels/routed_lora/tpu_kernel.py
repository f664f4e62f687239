"""The bodies of the TPU kernels: the two phases of a tile, and what happens to its rank space between them."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.routed_lora.layout import Banks

BLOCK_BYTES = 4 * 2**20  # VMEM for the blocks of one phase, both buffers


@dataclasses.dataclass(frozen=True)
class Phases:
    """How a tile's grid steps divide: first `steps_in` blocks of the width in, then blocks of the width out."""

    width_in: int
    width_out: int
    steps_in: int
    steps: int

    @classmethod
    def of(cls, pair: Banks, rows: int, lanes: int, itemsize: int) -> "Phases":
        limit = BLOCK_BYTES // (2 * itemsize * (rows + lanes))
        width_in, width_out = block_width(pair.width_in, limit), block_width(pair.width_out, limit)
        steps_in = pair.width_in // width_in
        return cls(width_in, width_out, steps_in, steps_in + pair.width_out // width_out)

    def into(self, step):
        return jnp.minimum(step, self.steps_in - 1)

    def out_of(self, step):
        return jnp.maximum(step - self.steps_in, 0)


def block_width(width: int, limit: int) -> int:
    """The largest divisor of `width` in whole lanes and within `limit`; the whole width where there is none."""
    fits = [w for w in range(128, min(width, max(limit, 128)) + 1, 128) if width % w == 0]
    return max(fits, default=width)


def dot(x, y, *, transposed: bool = False):
    """x y, or x yᵀ, in their common dtype with fp32 sums."""
    common = jnp.promote_types(x.dtype, y.dtype)
    precision = lax.Precision.HIGHEST if common == jnp.float32 else None
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(
        x.astype(common), y.astype(common), dims, precision=precision, preferred_element_type=jnp.float32
    )


def packed_kernel(x, route, mult, down, up, y, *rest, steps_in: int, experts: int, rank: int, hard: bool):
    """One step of a tile of tokens against all experts, [E·R] ranks side by side."""
    *u, acc, h = rest
    step = pl.program_id(1)
    lanes = experts * rank

    @pl.when(step < steps_in)
    def _():
        shrink(x, down, acc, step)

    @pl.when(step == steps_in - 1)
    def _():
        factor = spread(mult[...], rank, lanes, by_rank=True)
        if hard:
            mine = own_ranks(route[...], rank, lanes)
            space = jnp.where(mine, acc[...], 0.0)
            for ref in u:
                ref[...] = dot(space, fold(rank, lanes))
            h[...] = jnp.where(mine, space * factor, 0.0).astype(h.dtype)
        else:
            h[...] = (acc[...] * spread(route[...], rank, lanes, by_rank=False) * factor).astype(h.dtype)

    @pl.when(step >= steps_in)
    def _():
        if hard and experts > 1:
            emit_guarded(h, up, route, y, rank)
        else:
            y[...] = dot(h[...], up[...]).astype(y.dtype)


def tile_kernel(expert, count, x, mult, down, up, y, *rest, steps_in: int):
    """One step of a tile of tokens against the expert that the index maps fetched; unused tiles do nothing."""
    *u, acc, h = rest
    step = pl.program_id(1)
    live = pl.program_id(0) < count[0]

    @pl.when(live & (step < steps_in))
    def _():
        shrink(x, down, acc, step)

    @pl.when(live & (step == steps_in - 1))
    def _():
        for ref in u:
            ref[...] = acc[...]
        h[...] = (acc[...] * mult[...]).astype(h.dtype)

    @pl.when(live & (step >= steps_in))
    def _():
        y[...] = dot(h[...], up[...]).astype(y.dtype)


def shrink(x, down, acc, step):
    part = dot(x[...], down[...], transposed=True)
    acc[...] = jnp.where(step == 0, part, acc[...] + part)


def emit_guarded(h, up, route, y, rank: int):
    """y = h up where the ranks of other experts are zero in h: 0 · nan would still be nan, so those are kept out."""
    bank = up[...].astype(jnp.float32)
    finite = jnp.abs(bank) < jnp.inf
    clean = jnp.min(finite.astype(jnp.float32)) > 0

    @pl.when(clean)
    def _():
        y[...] = dot(h[...], up[...]).astype(y.dtype)

    @pl.when(jnp.logical_not(clean))
    def _():
        value = dot(h[...], jnp.where(finite, bank, 0.0).astype(up.dtype))
        mine = own_ranks(route[...], rank, h.shape[1]).astype(jnp.float32)
        hits = dot(mine, jnp.where(finite, 0.0, 1.0))
        y[...] = jnp.where(hits > 0, jnp.nan, value).astype(y.dtype)


def own_ranks(ids, rank: int, lanes: int):
    """[rows E·R] mask of the ranks of each row's expert, from ids [rows 1]."""
    lane = lax.broadcasted_iota(jnp.int32, (ids.shape[0], lanes), 1)
    return (lane >= ids * rank) & (lane < (ids + 1) * rank)


def spread(factor, rank: int, lanes: int, *, by_rank: bool):
    """Per-rank (or per-expert) factors of each row on all lanes: [rows E·R]; one factor a row stays [rows 1]."""
    if factor.shape[1] == 1 and by_rank:
        return factor
    if by_rank:
        return dot(factor.astype(jnp.float32), fold(rank, lanes), transposed=True)
    return dot(factor.astype(jnp.float32), blocks(factor.shape[1], rank))


def fold(rank: int, lanes: int):
    """0/1 matrix [E·R R] that sums the same rank of all experts."""
    lane = lax.broadcasted_iota(jnp.int32, (lanes, rank), 0)
    return (lax.rem(lane, rank) == lax.broadcasted_iota(jnp.int32, (lanes, rank), 1)).astype(jnp.float32)


def blocks(experts: int, rank: int):
    """0/1 matrix [E E·R] that repeats each expert's factor over its ranks."""
    lane = lax.broadcasted_iota(jnp.int32, (experts, experts * rank), 1)
    first = lax.broadcasted_iota(jnp.int32, (experts, experts * rank), 0) * rank
    return ((lane >= first) & (lane < first + rank)).astype(jnp.float32)
