"""Pallas kernels for GPU, by way of Triton: one program scans all tokens of a batch row and a block of channels.

JAX 0.11 declared its Triton lowering deprecated and 0.12 still has it; where it is gone, `why_not` says so and the xla
path serves the GPU.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.selective_scan import gpu_kernel
from pallas_kernels.selective_scan.layout import Operands

CHUNK = 32  # tokens between kept states; the backward writes their states to memory, little enough to stay in L2
CHANNELS = 32  # of a block: a warp reads one row of them at once
STATE_LIMIT = 256


def why_not(ops: Operands) -> str | None:
    """Why these operands cannot run here, as the end of a sentence; None where they can."""
    if gpu_kernel.triton is None:
        return f"needs the Pallas Triton backend, which jax {jax.__version__} no longer has"
    dtypes = {str(x.dtype) for x in ops[:6]}
    if not dtypes <= {"float32", "bfloat16", "float16"}:
        return f"takes float32, bfloat16 and float16, got {', '.join(sorted(dtypes))}"
    if ops.sizes[3] > STATE_LIMIT:
        return f"takes up to {STATE_LIMIT} states a channel, got {ops.sizes[3]}"
    return None


def forward(ops: Operands, *, starts: bool, interpret=False):
    """(y [B T C], h_T [B N C], the state before each chunk [B K N C] or None)."""
    B, T, C, N = ops.sizes
    shapes = ((B, T, C), (B, N, C), (B, pl.cdiv(T, CHUNK), N, C) if starts else None)
    return call("forward", gpu_kernel.forward_kernel, ops, (ops,), shapes, interpret)


def backward(ops: Operands, first, dy, last, *, interpret=False) -> Operands:
    """Cotangents of all operands from those of y and h_T; `first` is what `forward` kept."""
    B, T, C, N = ops.sizes
    blocks = pl.cdiv(C, CHANNELS)
    tokens, partial = (B, T, C), (blocks, B, T, N)
    shapes = (tokens, tokens, (B, N, C), partial, partial, (B, N, C), (B, CHUNK, N, C))
    arrays = (ops._replace(h0=first), dy, last)
    du, ddt, dA, dB, dC, dh0, _ = call("backward", gpu_kernel.backward_kernel, ops, arrays, shapes, interpret)
    return ops.like(u=du, dt=ddt, A=dA.sum(0), Bm=dB.sum(0), Cm=dC.sum(0), h0=dh0)


def call(name: str, kernel, ops: Operands, arrays: tuple, shapes: tuple, interpret) -> tuple:
    """Runs a kernel over (batch row, block of channels); None among the `shapes` of the results is for no result."""
    B, T, C, N = ops.sizes
    lanes = pl.next_power_of_2(N)
    steps = B * T * C * N
    results = tuple(None if shape is None else jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    run = pl.pallas_call(
        functools.partial(kernel, sizes=ops.sizes, chunk=CHUNK, lanes=lanes, channels=CHANNELS, barrier=not interpret),
        grid=(B, pl.cdiv(C, CHANNELS)),
        out_shape=results,
        compiler_params=gpu_kernel.triton.CompilerParams(num_warps=max(1, lanes * CHANNELS // 512), num_stages=2),
        cost_estimate=pl.CostEstimate(
            flops=(6 if name == "forward" else 22) * steps,
            transcendentals=(1 if name == "forward" else 2) * steps,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((arrays, results))),
        ),
        interpret=interpret,
        name=f"selective_scan_{name}",
    )
    return run(*arrays)
