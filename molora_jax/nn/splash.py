"""Attention over long rows on a TPU: splash attention of JAX, which keeps no score beyond one tile of them."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from molora_jax.nn.layout import Dense
from molora_jax.typing import Array, Float, Int
from pallas_kernels.common import round_up, target
from pallas_kernels.mesh import over_mesh

LANES, BLOCK = 128, 512
"""A tile's sides are multiples of the first, and where the row allows it as long as the second."""


def runs_here(dtype) -> bool:
    """Whether the running trace is for a platform and a dtype that the kernel takes."""
    return target()[0] == "tpu" and jnp.dtype(dtype).itemsize <= 4


def splash_attention(
    q: Float[Array, "B H T d"],
    k: Float[Array, "B K T d"],
    v: Float[Array, "B K T d"],
    layout: Dense,
    *,
    window: Int[Array, ""] | int,
    windows: tuple[int, ...],
    interpret: bool = False,
) -> Float[Array, "B H T d"]:
    """softmax(q kᵀ) v as `attention.dense_attention` has it, q already scaled; each device has its rows and heads.

    Positions ascend within a segment, as `layout.dense` counts them. A pad between tokens of one segment counts as one
    of them for the window's length.

    Args:
      windows: all values that `window` may take; each is a mask, known when the program is compiled.
      interpret: run the kernels in the Pallas interpreter, to test them on a CPU.
    """
    segments = jnp.where(layout.valid, layout.segments, -1)
    windows = sorted(set(windows))
    branches = [functools.partial(_windowed, one, interpret) for one in windows]
    at = jnp.searchsorted(jnp.asarray(windows), window)
    run = lambda *operands: jax.lax.switch(at, branches, *operands) if len(branches) > 1 else branches[0](*operands)
    heads = ("rows", "columns", None, None)
    return over_mesh(run, (heads, heads, heads, ("rows", None)), heads, q, k, v, segments)


def _windowed(window: int, interpret: bool, q, k, v, segments):
    """By the kernel for one window, 0 for none, over rows that are filled up to whole tiles."""
    heads, length = q.shape[1:3]
    tiled = round_up(length, LANES)
    block = next(size for size in (BLOCK, BLOCK // 2, LANES) if tiled % size == 0)
    sides = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    mask = splash.LocalMask((tiled, tiled), (window - 1, 0), 0) if window else splash.CausalMask((tiled, tiled))
    attend = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(**dict.fromkeys(sides, block)),
        interpret=interpret,
    )
    more = (0, tiled - length)
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), more, (0, 0))) for x in (q, k, v))
    segments = jnp.pad(segments, ((0, 0), more), constant_values=-1)
    return jax.vmap(attend)(q, k, v, splash.SegmentIds(segments, segments))[:, :, :length]
