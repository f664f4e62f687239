"""The bodies of the GPU kernels: all tokens of one batch row and one block of channels."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

try:
    from jax.experimental.pallas import triton
except ImportError:
    triton = None


class Block:
    """Where one program reads and writes: a row and a block of channels.

    Triton wants powers of two, so states and channels are masked up to `lanes` and `channels`: what lies outside reads
    as zero and is not written. Axes are "C", "N" or "NC", behind a lead of scalar indices.
    """

    def __init__(self, sizes: tuple[int, int, int, int], lanes: int, channels: int):
        _, _, C, N = sizes
        self.row, self.block = pl.program_id(0), pl.program_id(1)
        n, c = jnp.arange(lanes), self.block * channels + jnp.arange(channels)
        self.index = {"C": (c,), "N": (n,), "NC": (n[:, None], c[None])}
        self.inside = {"C": c < C, "N": n < N, "NC": (n < N)[:, None] & (c < C)[None]}

    def load(self, ref, *lead, axes: str):
        x = triton.load(ref.at[*lead, *self.index[axes]], mask=self.inside[axes], other=0.0)
        return x.astype(jnp.float32)

    def store(self, ref, value, *lead, axes: str):
        triton.store(ref.at[*lead, *self.index[axes]], value, mask=self.inside[axes])

    def token(self, ops, t):
        """u, dt [C] and B [N] of a token, and whether it resets."""
        u, dt = (self.load(ref, self.row, t, axes="C") for ref in (ops.u, ops.dt))
        reset = None if ops.reset is None else triton.load(ops.reset.at[self.row, t]) > 0
        return u, dt, self.load(ops.Bm, self.row, t, axes="N"), reset


def forget(reset, x):
    return x if reset is None else jnp.where(reset, 0.0, x)


def forward_kernel(ops, y_ref, last_ref, start_ref, *, sizes, chunk: int, lanes: int, channels: int, barrier: bool):
    """`ops` holds references to the whole arrays; start_ref may be None."""
    del barrier  # the forward reads nothing that it wrote
    at = Block(sizes, lanes, channels)
    A = at.load(ops.A, axes="NC")

    def scan_chunk(k, h):
        if start_ref is not None:
            at.store(start_ref, h, at.row, k, axes="NC")

        def step(t, h):
            u, dt, b, reset = at.token(ops, t)
            h = jnp.exp(dt[None] * A) * forget(reset, h) + (dt * u)[None] * b[:, None]
            c = at.load(ops.Cm, at.row, t, axes="N")
            at.store(y_ref, jnp.sum(c[:, None] * h, axis=0), at.row, t, axes="C")
            return h

        return jax.lax.fori_loop(k * chunk, jnp.minimum((k + 1) * chunk, sizes[1]), step, h)

    h = jax.lax.fori_loop(0, pl.cdiv(sizes[1], chunk), scan_chunk, at.load(ops.h0, at.row, axes="NC"))
    at.store(last_ref, h, at.row, axes="NC")


def backward_kernel(ops, dy_ref, dlast_ref, *refs, sizes, chunk: int, lanes: int, channels: int, barrier: bool):
    """ops.h0 holds the state before each chunk; `states` [B Q N C] is room for those of one chunk."""
    du_ref, ddt_ref, dA_ref, dB_ref, dC_ref, dh0_ref, states = refs
    at = Block(sizes, lanes, channels)
    A = at.load(ops.A, axes="NC")
    chunks = pl.cdiv(sizes[1], chunk)

    def recompute(first, t, h):
        u, dt, b, reset = at.token(ops, t)
        h = forget(reset, h)
        at.store(states, h, at.row, t - first, axes="NC")
        return jnp.exp(dt[None] * A) * h + (dt * u)[None] * b[:, None]

    def pull_back(first, t, carry):
        g, dA = carry
        u, dt, b, reset = at.token(ops, t)
        c, dy = at.load(ops.Cm, at.row, t, axes="N"), at.load(dy_ref, at.row, t, axes="C")
        decay = jnp.exp(dt[None] * A)
        decayed = decay * at.load(states, at.row, t - first, axes="NC")
        g = g + c[:, None] * dy[None]
        slope = g * decayed
        along = jnp.sum(g * b[:, None], axis=0)
        at.store(du_ref, dt * along, at.row, t, axes="C")
        at.store(ddt_ref, jnp.sum(slope * A, axis=0) + u * along, at.row, t, axes="C")
        dB = jnp.sum(g * (dt * u)[None], axis=1)
        dC = jnp.sum((decayed + (dt * u)[None] * b[:, None]) * dy[None], axis=1)
        at.store(dB_ref, dB, at.block, at.row, t, axes="N")
        at.store(dC_ref, dC, at.block, at.row, t, axes="N")
        return forget(reset, decay * g), dA + slope * dt[None]

    def chunk_back(i, carry):
        first = (chunks - 1 - i) * chunk
        end = jnp.minimum(first + chunk, sizes[1])
        start = at.load(ops.h0, at.row, chunks - 1 - i, axes="NC")
        jax.lax.fori_loop(first, end, lambda t, h: recompute(first, t, h), start)
        if barrier:
            triton.debug_barrier()
        carry = jax.lax.fori_loop(0, end - first, lambda s, carry: pull_back(first, end - 1 - s, carry), carry)
        if barrier:
            triton.debug_barrier()
        return carry

    g = at.load(dlast_ref, at.row, axes="NC")
    g, dA = jax.lax.fori_loop(0, chunks, chunk_back, (g, jnp.zeros_like(g)))
    at.store(dA_ref, dA, at.row, axes="NC")
    at.store(dh0_ref, g, at.row, axes="NC")
