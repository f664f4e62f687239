"""Any platform: a scan over tokens, in chunks; only the state before each chunk outlives the forward.

Never `associative_scan`: on a CPU it was 7 to 24 times slower forward than `lax.scan`, and took four times the memory.
"""

import jax.numpy as jnp

from pallas_kernels import common
from pallas_kernels.selective_scan.blocks import Blocks, each, loop
from pallas_kernels.selective_scan.layout import Operands

CHUNK = 64  # tokens whose states the backward holds at once; a block of them fits a core's L2 cache
# XLA's CPU compiles a small step tightly, 0.6 ns an element of state. From 4,096 elements on it may hand every step to
# its thread pool, which was 20 times slower (jax 0.10).
CPU_STATE = 2048


def forward(ops: Operands, *, starts: bool, interpret=False):
    """(y [B T C], h_T [B N C], the state before each chunk, in blocks, or None)."""
    blocks = cut(ops)

    def block(mine, shared, A):
        h, u, dt = mine

        def chunk(h, tokens):
            last, y = loop(lambda h, token: emit(A, h, token), h, tokens)
            return last, (y, h if starts else None)

        return loop(chunk, h, (u, dt, *shared))

    last, (y, first) = each(block, *operands(blocks, ops))
    return blocks.join_moving(y), blocks.join_states(last), first


def backward(ops: Operands, first, dy, last, *, interpret=False) -> Operands:
    """Cotangents of all operands from those of y and h_T; `first` is what `forward` kept."""
    blocks = cut(ops)
    (h0, u, dt), shared, A = operands(blocks, ops)

    def block(mine, shared, A):
        g, first, dy, u, dt = mine

        def chunk(carry, tokens):
            h, dy, *tokens = tokens
            _, states = loop(lambda h, token: recompute(A, h, token), h, tokens)
            return loop(lambda carry, token: pull_back(A, carry, token), carry, (dy, states, *tokens), reverse=True)

        return loop(chunk, (g, jnp.zeros_like(g)), (first, dy, u, dt, *shared), reverse=True)

    per_block = (blocks.cut_states(last), first, blocks.cut_moving(dy), u, dt)
    (g, dA), (du, ddt, dB, dC) = each(block, per_block, shared, A)
    return ops.like(
        u=blocks.join_moving(du),
        dt=blocks.join_moving(ddt),
        A=blocks.join_channels(dA.sum((0, 2))),
        Bm=blocks.join_tokens(dB.sum(1)),
        Cm=blocks.join_tokens(dC.sum(1)),
        h0=blocks.join_states(g),
    )


def cut(ops: Operands) -> Blocks:
    """Blocks for the CPU's sake; a single token is no loop, so neither are its rows and channels."""
    small = common.target()[0] == "cpu" and ops.sizes[1] > 1
    return Blocks.of(ops.sizes, chunk=CHUNK, state=CPU_STATE if small else None)


def operands(blocks: Blocks, ops: Operands):
    """The three trees of `each`: (h0, u, dt), (Bm, Cm, reset) and A."""
    wide = lambda x: x.astype(ops.acc)
    per_block = (blocks.cut_states(wide(ops.h0)), blocks.cut_moving(wide(ops.u)), blocks.cut_moving(wide(ops.dt)))
    reset = None if ops.reset is None else blocks.cut_tokens(ops.reset)
    per_row = (blocks.cut_tokens(wide(ops.Bm)), blocks.cut_tokens(wide(ops.Cm)), reset)
    return per_block, per_row, blocks.cut_channels(wide(ops.A))


def advance(A, h, u, dt, b, reset):
    """One step of h [b N c]: (exp(dt A), the state that it decays, the new state)."""
    if reset is not None:
        h = jnp.where(reset[:, None, None], 0, h)
    decay = jnp.exp(dt[:, None] * A)
    return decay, h, decay * h + (dt * u)[:, None] * b[:, :, None]


def emit(A, h, token):
    """A step of the forward: the new state and y."""
    u, dt, b, c, reset = token
    _, _, h = advance(A, h, u, dt, b, reset)
    return h, jnp.sum(c[:, :, None] * h, axis=1)


def recompute(A, h, token):
    """A step of the forward again: the new state, and what `pull_back` needs of it."""
    u, dt, b, _, reset = token
    decay, before, h = advance(A, h, u, dt, b, reset)
    return h, (decay, decay * before)


def pull_back(A, carry, token):
    """A step of the reverse recurrence of `vjp._backward`; the carry is (exp(dt_{t+1} A) g_{t+1}, dA so far)."""
    g, dA = carry
    dy, (decay, decayed), u, dt, b, c, reset = token
    b, dtu = b[:, :, None], (dt * u)[:, None]
    g = g + c[:, :, None] * dy[:, None]
    along = jnp.sum(g * b, axis=1)
    ddt = jnp.sum(A * g * decayed, axis=1) + u * along
    dB = jnp.sum(g * dtu, axis=2)
    dC = jnp.sum((decayed + dtu * b) * dy[:, None], axis=2)
    dA = dA + g * decayed * dt[:, None]
    g = decay * g
    if reset is not None:
        g = jnp.where(reset[:, None, None], 0, g)
    return (g, dA), (dt * along, ddt, dB, dC)
