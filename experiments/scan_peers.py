"""Other ways to compute the selective scan, for the benchmark of ours; mambapy and torch are optional packages."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np


def operands(b: int, t: int, c: int, n: int):
    """u, dt, A, B, C, D as a Mamba block has them at its start, and a cotangent of y."""
    draw = lambda *shape, rng=np.random.default_rng(0): rng.standard_normal(shape, np.float32)
    A = np.tile(-np.arange(1, n + 1, dtype=np.float32), (c, 1))
    return (draw(b, t, c), np.exp(draw(b, t, c) - 4), A, draw(b, t, n), draw(b, t, n), draw(c)), draw(b, t, c)


def torch_scan(name: str, ops: Sequence[np.ndarray], dy: np.ndarray, threads: int):
    """The selective scan of u, dt, A, B, C, D in torch: functions for (y,), and for (y, all gradients).

    None if torch, or mambapy, is not installed.

    Args:
      name: `mambapy`, its parallel scan; `torch_loop`, the recurrence written down.
    """
    try:
        import torch

        if name == "mambapy":
            from mambapy.mamba import MambaBlock
    except ImportError:
        return None
    torch.set_num_threads(threads)
    inputs, cotangent = [torch.tensor(x, requires_grad=True) for x in ops], torch.tensor(dy)

    def loop(u, dt, A, B, C, D):
        h, ys = torch.zeros(u.shape[0], *A.shape), []
        for t in range(u.shape[1]):
            h = torch.exp(dt[:, t, :, None] * A) * h + (dt[:, t] * u[:, t])[:, :, None] * B[:, t, None]
            ys.append((h * C[:, t, None]).sum(-1))
        return torch.stack(ys, dim=1) + D * u

    scan = loop if name == "torch_loop" else functools.partial(MambaBlock.selective_scan, None)

    def forward():
        with torch.no_grad():
            return (scan(*inputs),)

    def both():
        y = scan(*inputs)
        return y, torch.autograd.grad(y, inputs, cotangent)

    return forward, both


def jax_scan(scan: Callable, ops: Sequence[jax.Array], dy: jax.Array):
    """The same two functions of a scan in jax, compiled."""

    def gradients(dy, *ops):
        y, pull_back = jax.vjp(scan, *ops)
        return y, pull_back(dy)

    forward = jax.jit(lambda *ops: (scan(*ops),)).lower(*ops).compile()
    both = jax.jit(gradients).lower(dy, *ops).compile()
    return lambda: jax.block_until_ready(forward(*ops)), lambda: jax.block_until_ready(both(dy, *ops))


def associative_scan(u, dt, A, B, C, D):
    """The selective scan by `jax.lax.associative_scan`."""
    decay, step = jnp.exp(dt[..., None] * A), (dt * u)[..., None] * B[:, :, None]
    join = lambda left, right: (right[0] * left[0], right[0] * left[1] + right[1])
    return jnp.sum(jax.lax.associative_scan(join, (decay, step), axis=1)[1] * C[:, :, None], -1) + D * u
