"""Pallas kernel for GPU, by way of Triton: tiles of one expert, rows gathered in place, the rank space in registers.

JAX 0.11 declared its Triton lowering deprecated and 0.12 still has it; where it is gone, `why_not` says so and the xla
path serves the GPU.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.routed_lora import schedule
from pallas_kernels.routed_lora.layout import Banks, operand

try:
    from jax.experimental.pallas import triton
except ImportError:
    triton = None

RANK_LIMIT = 128  # the rank space of a tile is held in registers
BLOCK = 128  # columns of one load of x, a bank or y
PROGRAMS = 256  # enough to fill a large GPU; a tile is cut along the width out until there are so many


def why_not(x, pair: Banks, *, soft: bool) -> str | None:
    """Why these operands cannot run here, as the end of a sentence; None where they can."""
    if triton is None or not hasattr(triton, "CompilerParams"):
        return f"needs the Pallas Triton backend, which jax {jax.__version__} no longer has"
    dtypes = {str(v.dtype) for v in (x, pair.down, pair.up)}
    if not dtypes <= {"float32", "bfloat16", "float16"}:
        return f"takes float32, bfloat16 and float16, got {', '.join(sorted(dtypes))}"
    if soft:
        return "takes ids only (a mixture by weights is two dense products)"
    if pair.rank > RANK_LIMIT:
        return f"takes ranks up to {RANK_LIMIT}, got {pair.rank}"
    return None


def hard(x, pair: Banks, ids, mult, *, with_rank: bool = False, interpret=False):
    """`reference.hard`. Rows are written once and by one program, so the result is the same in every run."""
    n, mult = len(x), mult.reshape(len(x), -1)
    tile = min(max(16, (1 << (n // pair.experts).bit_length()) // 2), 64)
    plan = schedule.sort(ids, pair.experts, tile)
    count = len(plan.expert)
    splits = max(1, min(pl.cdiv(pair.width_out, BLOCK), PROGRAMS // count))
    columns = pl.cdiv(pl.cdiv(pair.width_out, BLOCK), splits) * BLOCK
    lanes = max(16, pl.next_power_of_2(pair.rank))
    kernel = functools.partial(
        tile_kernel, axes=(pair.down_axes, pair.up_axes), tile=tile, lanes=lanes, columns=columns
    )
    width = pair.width_in + pair.width_out
    out = pl.pallas_call(
        kernel,
        grid=(count, pl.cdiv(pair.width_out, columns)),
        out_shape=[jax.ShapeDtypeStruct((n, pair.width_out), x.dtype)]
        + [jax.ShapeDtypeStruct((n, pair.rank), jnp.float32)] * with_rank,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        cost_estimate=pl.CostEstimate(
            flops=2 * n * pair.rank * width,
            bytes_accessed=n * width * x.dtype.itemsize + count * pair.rank * width * pair.down.dtype.itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name="routed_lora_gpu",
    )(plan.order, plan.expert, plan.start, plan.size, plan.count[None], x, mult, pair.down, pair.up)
    none = ((ids < 0) | (ids >= pair.experts))[:, None]
    return jnp.where(none, 0, out[0]), jnp.where(none, 0, out[1]) if with_rank else None


def tile_kernel(order, expert, start, size, count, x, mult, down, up, y, *u, axes, tile: int, lanes: int, columns: int):
    """One tile of sorted tokens and one run of `columns` of its output; every run goes down to the rank space anew."""
    t, j = pl.program_id(0), pl.program_id(1)
    pair = Banks(down, up, *axes)

    @pl.when(t < count[0])
    def _():
        row = jnp.arange(tile)
        live = (row < size[t])[:, None]
        token = triton.load(order.at[start[t] + row], mask=row < size[t], other=x.shape[0])[:, None]
        rank = jnp.arange(lanes)[None]
        space = shrink(x, pair, token, live, expert[t], lanes)
        for ref in u:
            triton.store(ref.at[token, rank], space, mask=live & (rank < pair.rank) & (j == 0))
        column = rank if mult.shape[1] > 1 else 0 * rank
        factor = triton.load(mult.at[token, column], mask=live & (column < mult.shape[1]), other=0.0)
        h = (space * factor).astype(operand(x, up))
        first = j * columns
        last = jnp.minimum(first + columns, pair.width_out)
        expand(h, pair, y, token, live, expert[t], first, last)


def shrink(x, pair: Banks, token, live, e, lanes: int):
    """down_e x_n of a tile: [tile lanes], zero past the rank."""

    def add(k, space):
        d = k * BLOCK + jnp.arange(BLOCK)
        rows = triton.load(x.at[token, d[None]], mask=live & (d < pair.width_in)[None], other=0.0)
        return space + dot(rows, load_bank(pair.down, pair.down_axes[1:], e, "dr", d, jnp.arange(lanes)))

    empty = jnp.zeros((token.shape[0], lanes), jnp.float32)
    return jax.lax.fori_loop(0, pl.cdiv(pair.width_in, BLOCK), add, empty)


def expand(h, pair: Banks, y, token, live, e, first, last):
    """Writes columns [first, last) of up_e h_n to the rows of y that the tokens own."""

    def emit(k, _):
        f = first + k * BLOCK + jnp.arange(BLOCK)
        out = dot(h, load_bank(pair.up, pair.up_axes[1:], e, "rf", jnp.arange(h.shape[1]), f))
        triton.store(y.at[token, f[None]], out.astype(y.dtype), mask=live & (f < last)[None])

    jax.lax.fori_loop(0, (last - first + BLOCK - 1) // BLOCK, emit, None)


def load_bank(bank, stored: str, e, wanted: str, rows, cols):
    """The block [rows cols] of expert e with the axes in the `wanted` order, whichever way they are stored."""
    if stored != wanted:
        return load_bank(bank, stored, e, stored, cols, rows).T
    mask = (rows < bank.shape[1])[:, None] & (cols < bank.shape[2])[None]
    return triton.load(bank.at[e, rows[:, None], cols[None]], mask=mask, other=0.0)


def dot(x, y):
    common = operand(x, y)
    precision = jax.lax.Precision.HIGHEST if common == jnp.float32 else None
    return jnp.dot(x.astype(common), y.astype(common), precision=precision, preferred_element_type=jnp.float32)
