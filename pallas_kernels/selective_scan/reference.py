"""The definition: one step of the recurrence a token, differentiated by jax. Keeps every state in the backward."""

import jax
import jax.numpy as jnp

from pallas_kernels.selective_scan.layout import Operands


def scan(ops: Operands) -> tuple[jax.Array, jax.Array]:
    """h_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t and y_t = C_t · h_t: (y [B T C], h_T [B N C])."""
    wide = lambda x: x.astype(ops.acc)

    def step(h, token):
        u, dt, b, c, reset = token
        if reset is not None:
            h = jnp.where(reset[:, None, None], 0, h)
        h = jnp.exp(dt[:, None] * wide(ops.A)) * h + (dt * u)[:, None] * b[:, :, None]
        return h, jnp.sum(c[:, :, None] * h, axis=1)

    moving = jax.tree.map(lambda x: x.swapaxes(0, 1), (*map(wide, (ops.u, ops.dt, ops.Bm, ops.Cm)), ops.reset))
    last, y = jax.lax.scan(step, wide(ops.h0), moving)
    return y.swapaxes(0, 1), last
