"""The bodies of the TPU kernels: one chunk of one batch row and one block of channels.

A state is [N C], channels on lanes. B_t and C_t are columns of [N Q] blocks, so that they broadcast along lanes; tokens
go in groups of eight, one sublane tile of u, dt and y.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

GROUP = 8


def groups(count: int, step, carry, *, reverse: bool = False):
    """step(first token, carry) for every group of tokens, the last first if `reverse`."""
    last = count // GROUP - 1

    def body(i, carry):
        return step(pl.multiple_of(GROUP * (last - i if reverse else i), GROUP), carry)

    return jax.lax.fori_loop(0, last + 1, body, carry)


def column(x, t):
    """Column t of x [R Q], as [R 1]."""
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.sum(jnp.where(lane == t, x, 0.0), axis=1, keepdims=True)


def with_column(x, t, value):
    """x [R Q] with column t replaced by value [R 1]."""
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where(lane == t, value, x)


def forget(reset_ref, t, x):
    """x [N C], or zero where token t resets."""
    return x if reset_ref is None else jnp.where(column(reset_ref[...], t) > 0, 0.0, x)


def load_steps(u_ref, dt_ref, dt_rows, dtu_rows):
    """dt and dt · u of the chunk in fp32, once, because single rows of packed dtypes cannot be read."""
    dt_rows[...] = dt_ref[...].astype(jnp.float32)
    dtu_rows[...] = dt_rows[...] * u_ref[...].astype(jnp.float32)


def forward_kernel(operands, y_ref, last_ref, start_ref, h, dt_rows, dtu_rows, *, tokens: int, chunks: int):
    """`operands` holds references; h [N C] is the state, kept from chunk to chunk; start_ref may be None."""
    u_ref, dt_ref, A_ref, b_ref, c_ref, h0_ref, reset_ref = operands
    chunk = pl.program_id(2)

    @pl.when(chunk == 0)
    def _():
        h[...] = h0_ref[...]

    if start_ref is not None:
        start_ref[...] = h[...]
    load_steps(u_ref, dt_ref, dt_rows, dtu_rows)
    A = A_ref[...]

    def step(first, state):
        rows = pl.ds(first, GROUP)
        dt, dtu, y = dt_rows[rows], dtu_rows[rows], []
        for i in range(GROUP):
            t, row = first + i, slice(i, i + 1)
            state = forget(reset_ref, t, state)
            state = jnp.exp(dt[row] * A) * state + dtu[row] * column(b_ref[...], t)
            y.append(jnp.sum(column(c_ref[...], t) * state, axis=0, keepdims=True))
        y_ref[rows] = jnp.concatenate(y, axis=0)
        return state

    h[...] = groups(tokens, step, h[...])

    @pl.when(chunk == chunks - 1)
    def _():
        last_ref[...] = h[...]


def backward_kernel(operands, cotangents, *refs, tokens: int, chunks: int):
    """The chunks come last first. g [N C] is exp(dt A) g of the token after the chunk; states [Q N C] those before."""
    u_ref, dt_ref, A_ref, b_ref, c_ref, start_ref, reset_ref = operands
    dy_ref, dlast_ref = cotangents
    du_ref, ddt_ref, dA_ref, dB_ref, dC_ref, dh0_ref, g, states, dt_rows, dtu_rows = refs
    chunk = pl.program_id(2)

    @pl.when(chunk == 0)
    def _():
        g[...] = dlast_ref[...]
        dA_ref[...] = jnp.zeros_like(dA_ref)

    load_steps(u_ref, dt_ref, dt_rows, dtu_rows)
    A = A_ref[...]

    def recompute(first, state):
        rows = pl.ds(first, GROUP)
        dt, dtu = dt_rows[rows], dtu_rows[rows]
        for i in range(GROUP):
            t, row = first + i, slice(i, i + 1)
            state = forget(reset_ref, t, state)
            states[t] = state
            state = jnp.exp(dt[row] * A) * state + dtu[row] * column(b_ref[...], t)
        return state

    groups(tokens, recompute, start_ref[...])

    def pull_back(first, carry):
        g, dA, dB, dC = carry
        rows = pl.ds(first, GROUP)
        dt, dtu, dy = dt_rows[rows], dtu_rows[rows], dy_ref[rows]
        along, slopes = [None] * GROUP, [None] * GROUP
        for i in reversed(range(GROUP)):
            t, row = first + i, slice(i, i + 1)
            b = column(b_ref[...], t)
            decay = jnp.exp(dt[row] * A)
            decayed = decay * states[t]
            g = g + column(c_ref[...], t) * dy[row]
            slope = g * decayed
            dA = dA + slope * dt[row]
            dB = with_column(dB, t, jnp.sum(g * dtu[row], axis=1, keepdims=True))
            dC = with_column(dC, t, jnp.sum((decayed + dtu[row] * b) * dy[row], axis=1, keepdims=True))
            along[i] = jnp.sum(g * b, axis=0, keepdims=True)
            slopes[i] = jnp.sum(slope * A, axis=0, keepdims=True)
            g = forget(reset_ref, t, decay * g)
        du_ref[rows] = jnp.concatenate(along, axis=0)
        ddt_ref[rows] = jnp.concatenate(slopes, axis=0)
        return g, dA, dB, dC

    empty = jnp.zeros(b_ref.shape, jnp.float32)
    carry = groups(tokens, pull_back, (g[...], dA_ref[...], empty, empty), reverse=True)
    g[...], dA_ref[...], dB_ref[...], dC_ref[...] = carry
    ddt_ref[...] += u_ref[...].astype(jnp.float32) * du_ref[...]
    du_ref[...] *= dt_rows[...]

    @pl.when(chunk == chunks - 1)
    def _():
        dh0_ref[...] = g[...]
