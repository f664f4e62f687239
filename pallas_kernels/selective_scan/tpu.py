"""Pallas kernels for TPU: chunks of time one after the other, the state in VMEM, batch rows and channels in parallel.

The forward writes the state before each chunk; the backward takes the chunks in reverse and recomputes the states of
one in VMEM. Sums over channels and rows are joined outside, so that nothing depends on the order of programs.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common import round_up
from pallas_kernels.selective_scan import tpu_kernel
from pallas_kernels.selective_scan.layout import Operands, pad

CHUNK = 128  # tokens of a chunk: the lanes of a block of B, C
STATE_LIMIT = 128  # the states of a chunk and the blocks then fit the 16 MB of a v4
STATES_BYTES = 4 * 2**20  # the states of a chunk in the backward; wider blocks of channels share the columns of B, C
VMEM_BYTES = 64 * 2**20  # a v5p has no more; a v4 takes what it has


def why_not(ops: Operands) -> str | None:
    """Why these operands cannot run here, as the end of a sentence; None where they can."""
    dtypes = {str(x.dtype) for x in ops[:6]}
    if not dtypes <= {"float32", "bfloat16"}:
        return f"takes float32 and bfloat16, got {', '.join(sorted(dtypes))}"
    if ops.sizes[3] > STATE_LIMIT:
        return f"takes up to {STATE_LIMIT} states a channel, got {ops.sizes[3]}"
    return None


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes after padding, and how the grid (batch row, block of channels, chunk) cuts them.

    Attributes:
      B, T, C, N: padded sizes.
      q: tokens of a chunk.
      c: channels of a block.
      backward: the chunks come last first.
    """

    B: int
    T: int
    C: int
    N: int
    q: int
    c: int
    backward: bool

    @classmethod
    def of(cls, ops: Operands, *, backward: bool) -> "Tiles":
        B, T, C, N = ops.sizes
        N = round_up(N, 8)
        q = CHUNK if T > CHUNK else round_up(T, 16)
        fit = [c for c in (512, 256, 128) if 4 * q * N * c <= STATES_BYTES and c < C + 128]
        c = fit[0] if fit else 128
        return cls(B, round_up(T, q), round_up(C, c), N, q, c, backward)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.B, self.C // self.c, self.chunks

    @property
    def chunks(self) -> int:
        return self.T // self.q

    def spec(self, axes: str) -> pl.BlockSpec:
        """The block of an array with these axes: B, C and T are cut, N is whole.

        J leads partial sums, one a block of channels; K leads what there is one of a chunk; 1 is an axis of one.
        """
        size = {"B": None, "J": None, "K": None, "C": self.c, "T": self.q, "N": self.N, "1": 1}

        def index(i, j, k):
            k = self.chunks - 1 - k if self.backward else k
            place = {"B": i, "J": j, "K": k, "C": j, "T": k}
            return tuple(place.get(axis, 0) for axis in axes)

        return pl.BlockSpec(tuple(size[axis] for axis in axes), index)

    def shape(self, axes: str) -> jax.ShapeDtypeStruct:
        size = dict(B=self.B, J=self.grid[1], K=self.chunks, C=self.C, T=self.T, N=self.N)
        return jax.ShapeDtypeStruct(tuple(size[axis] for axis in axes), jnp.float32)

    def fit(self, x: jax.Array, axes: str) -> jax.Array:
        """x padded to the size of each axis."""
        for axis, name in enumerate(axes):
            x = pad(x, axis, dict(B=self.B, C=self.C, T=self.T, N=self.N).get(name, x.shape[axis]))
        return x


def axes_of(ops: Operands, state: str = "BNC") -> Operands:
    """The axes of the operands as the kernels read them; `state` are those in the place of h0."""
    reset = None if ops.reset is None else "B1T"
    return Operands(u="BTC", dt="BTC", A="NC", Bm="BNT", Cm="BNT", h0=state, reset=reset)


def laid_out(tiles: Tiles, ops: Operands) -> Operands:
    """B, C and reset with tokens last, all but u and dt in fp32, all padded."""
    wide = lambda x: x.astype(jnp.float32)
    ops = ops._replace(
        A=wide(ops.A),
        Bm=wide(ops.Bm).swapaxes(1, 2),
        Cm=wide(ops.Cm).swapaxes(1, 2),
        h0=wide(ops.h0),
        reset=None if ops.reset is None else wide(ops.reset)[:, None],
    )
    return jax.tree.map(tiles.fit, ops, axes_of(ops))


def forward(ops: Operands, *, starts: bool, interpret=False):
    """(y [B T C], h_T [B N C], the state before each chunk [B K N C] or None)."""
    tiles = Tiles.of(ops, backward=False)
    operands = laid_out(tiles, ops)
    results = ("BTC", "BNC", "BKNC" if starts else None)
    y, last, first = call(tiles, (operands,), (axes_of(ops),), results, interpret)
    _, T, C, N = ops.sizes
    return y[:, :T, :C], last[:, :N, :C], first


def backward(ops: Operands, first, dy, last, *, interpret=False) -> Operands:
    """Cotangents of all operands from those of y and h_T; `first` is what `forward` kept."""
    tiles = Tiles.of(ops, backward=True)
    operands = laid_out(tiles, ops)._replace(h0=first)
    cotangents = (tiles.fit(dy, "BTC"), tiles.fit(last, "BNC"))
    axes = (axes_of(ops, state="BKNC"), ("BTC", "BNC"))
    results = ("BTC", "BTC", "BNC", "JBNT", "JBNT", "BNC")
    du, ddt, dA, dB, dC, dh0 = call(tiles, (operands, cotangents), axes, results, interpret)
    _, T, C, N = ops.sizes
    tokens = lambda x: jnp.sum(x, axis=0)[:, :N, :T].swapaxes(1, 2)
    return ops.like(
        u=du[:, :T, :C],
        dt=ddt[:, :T, :C],
        A=jnp.sum(dA, axis=0)[:N, :C],
        Bm=tokens(dB),
        Cm=tokens(dC),
        h0=dh0[:, :N, :C],
    )


def call(tiles: Tiles, arrays: tuple, axes: tuple, results: tuple, interpret) -> tuple:
    """Runs the kernel of the direction on trees of arrays with these axes; `results` are axes, None for none."""
    state = lambda *lead: pltpu.VMEM((*lead, tiles.N, tiles.c), jnp.float32)
    rows = pltpu.VMEM((tiles.q, tiles.c), jnp.float32)
    kernel = tpu_kernel.backward_kernel if tiles.backward else tpu_kernel.forward_kernel
    shapes = jax.tree.map(tiles.shape, results)
    steps = tiles.B * tiles.T * tiles.C * tiles.N
    run = pl.pallas_call(
        functools.partial(kernel, tokens=tiles.q, chunks=tiles.chunks),
        grid=tiles.grid,
        in_specs=jax.tree.map(tiles.spec, axes),
        out_specs=jax.tree.map(tiles.spec, results),
        out_shape=shapes,
        scratch_shapes=[state()] + [state(tiles.q)] * tiles.backward + [rows, rows],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=(22 if tiles.backward else 6) * steps,
            transcendentals=(2 if tiles.backward else 1) * steps,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((arrays, shapes))),
        ),
        interpret=interpret,
        name=f"selective_scan_{'backward' if tiles.backward else 'forward'}",
    )
    return run(*arrays)
