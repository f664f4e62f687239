"""Pallas kernels for TPU: down and up in one kernel, so that the rank space of a tile never leaves VMEM.

`packed` lays all experts side by side along the rank, which fills the 128 lanes that one small rank would waste; it
serves as long as the extra experts cost less than sorting the tokens. `tiles` sorts them, and a scalar-prefetched map
tells each tile which expert to fetch. Both walk a grid (token tile, step) whose first steps contract D and whose
later ones emit F.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common import round_up
from pallas_kernels.routed_lora import schedule, tpu_kernel
from pallas_kernels.routed_lora.layout import Banks, operand, rank_first

# By the peak figures of a v5e, 1,024 packed ranks of a row cost the MXU what moving the row to sort it costs the HBM.
PACKED_LIMIT = 1024
TOKENS = 256  # rows of a packed tile
VMEM_BYTES = 64 * 2**20  # a v5p has no more; the blocks take about a quarter
WHOLE_WIDTH_LIMIT = 8192  # widths that no 128 divides are one block


def why_not(x, pair: Banks, *, soft: bool) -> str | None:
    """Why these operands cannot run here, as the end of a sentence; None where they can."""
    dtypes = {str(v.dtype) for v in (x, pair.down, pair.up)}
    if not dtypes <= {"float32", "bfloat16"}:
        return f"takes float32 and bfloat16, got {', '.join(sorted(dtypes))}"
    if soft and pair.experts * pair.rank > PACKED_LIMIT:
        return f"takes weights up to E·R = {PACKED_LIMIT}, got {pair.experts * pair.rank}"
    for width in (pair.width_in, pair.width_out):
        if width % 128 and width > WHOLE_WIDTH_LIMIT:
            return f"takes widths above {WHOLE_WIDTH_LIMIT} only in multiples of 128, got {width}"
    if pair.rank > PACKED_LIMIT:
        return f"takes ranks up to {PACKED_LIMIT}, got {pair.rank}"
    return None


def hard(x, pair: Banks, ids, mult, *, with_rank: bool = False, interpret=False):
    """`reference.hard`."""
    run = packed if pair.experts * pair.rank <= PACKED_LIMIT else tiles
    y, u = run(x, pair, ids[:, None], mult.reshape(len(x), -1), with_rank=with_rank, interpret=interpret)
    none = ((ids < 0) | (ids >= pair.experts))[:, None]
    return jnp.where(none, 0, y), None if u is None else jnp.where(none, 0, u)


def soft(x, pair: Banks, mult, rank_gate=None, *, interpret=False):
    """`reference.soft`."""
    gate = jnp.ones((len(x), 1), mult.dtype) if rank_gate is None else rank_gate
    return packed(x, pair, mult, gate, interpret=interpret)[0]


def packed(x, pair: Banks, route, mult, *, with_rank=False, interpret=False):
    """All experts at once: route is ids [N 1] or weights [N E], mult [N 1] or [N R]."""
    n, lanes = len(x), pair.experts * pair.rank
    down, up = (bank.reshape(lanes, -1) for bank in rank_first(pair))
    tile = min(round_up(n, 16), TOKENS)
    steps = tpu_kernel.Phases.of(pair, tile, lanes, itemsize(x, pair))
    row = lambda width: pl.BlockSpec((tile, width), lambda i, s: (i, 0))
    grid_spec = pl.GridSpec(
        grid=(pl.cdiv(n, tile), steps.steps),
        in_specs=[
            pl.BlockSpec((tile, steps.width_in), lambda i, s: (i, steps.into(s))),
            row(route.shape[1]),
            row(mult.shape[1]),
            pl.BlockSpec((lanes, steps.width_in), lambda i, s: (0, steps.into(s))),
            pl.BlockSpec((lanes, steps.width_out), lambda i, s: (0, steps.out_of(s))),
        ],
        out_specs=[pl.BlockSpec((tile, steps.width_out), lambda i, s: (i, steps.out_of(s)))]
        + [row(pair.rank)] * with_rank,
        scratch_shapes=scratch(tile, lanes, x, pair),
    )
    kernel = functools.partial(
        tpu_kernel.packed_kernel,
        steps_in=steps.steps_in,
        experts=pair.experts,
        rank=pair.rank,
        hard=jnp.issubdtype(route.dtype, jnp.integer),
    )
    run = call("routed_lora_packed", kernel, grid_spec, n, lanes, x, pair, with_rank, interpret)
    y, *u = run(x, route, mult, down, up)
    return y, u[0] if with_rank else None


def tiles(x, pair: Banks, ids, mult, *, with_rank=False, interpret=False):
    """Sorted tokens, one expert a tile: ids [N 1], mult [N 1] or [N R]; only the banks of experts in use are read."""
    n, (down, up) = len(x), rank_first(pair)
    tile = min(max(16, (1 << (n // pair.experts).bit_length()) // 2), 128)
    plan = schedule.sort(ids[:, 0], pair.experts, tile)
    count = len(plan.expert)
    steps = tpu_kernel.Phases.of(pair, tile, pair.rank, itemsize(x, pair))
    # Tiles past the last one in use stay on one block, so that nothing is fetched for them.
    into = lambda t, s, c: jnp.where(t < c[0], steps.into(s), 0)
    out_of = lambda t, s, c: jnp.where(t < c[0], steps.out_of(s), 0)
    row = lambda width: pl.BlockSpec((tile, width), lambda t, s, e, c: (t, 0))
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(count, steps.steps),
        in_specs=[
            pl.BlockSpec((tile, steps.width_in), lambda t, s, e, c: (t, into(t, s, c))),
            row(mult.shape[1]),
            pl.BlockSpec((None, pair.rank, steps.width_in), lambda t, s, e, c: (e[t], 0, into(t, s, c))),
            pl.BlockSpec((None, pair.rank, steps.width_out), lambda t, s, e, c: (e[t], 0, out_of(t, s, c))),
        ],
        out_specs=[pl.BlockSpec((tile, steps.width_out), lambda t, s, e, c: (t, out_of(t, s, c)))]
        + [row(pair.rank)] * with_rank,
        scratch_shapes=scratch(tile, pair.rank, x, pair),
    )
    kernel = functools.partial(tpu_kernel.tile_kernel, steps_in=steps.steps_in)
    run = call("routed_lora_tiles", kernel, grid_spec, count * tile, pair.rank, x, pair, with_rank, interpret)
    flat = lambda v: schedule.padded(plan, v, tile).reshape(count * tile, -1)
    y, *u = run(plan.expert, plan.count[None], flat(x), flat(mult), down, up)
    return y[plan.slot], u[0][plan.slot] if with_rank else None


def itemsize(x, pair: Banks) -> int:
    return max(v.dtype.itemsize for v in (x, pair.down, pair.up))


def scratch(tile: int, lanes: int, x, pair: Banks) -> list:
    """The rank space of a tile: its fp32 sum, and what enters the second product."""
    return [pltpu.VMEM((tile, lanes), jnp.float32), pltpu.VMEM((tile, lanes), operand(x, pair.up))]


def call(name: str, kernel, grid_spec, rows: int, lanes: int, x, pair: Banks, with_rank: bool, interpret):
    """The pallas_call of either kernel on `rows` rows of `lanes` ranks."""
    width = pair.width_in + pair.width_out
    passes = grid_spec.grid[0]
    bank_bytes = lanes * width * pair.down.dtype.itemsize
    return pl.pallas_call(
        kernel,
        grid_spec=grid_spec,
        out_shape=[jax.ShapeDtypeStruct((rows, pair.width_out), x.dtype)]
        + [jax.ShapeDtypeStruct((rows, pair.rank), jnp.float32)] * with_rank,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * lanes * width,
            bytes_accessed=rows * width * x.dtype.itemsize + passes * bank_bytes,
            transcendentals=0,
        ),
        interpret=interpret,
        name=name,
    )
