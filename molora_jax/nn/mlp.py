"""The gated feed-forward block."""

import functools

import jax
import jax.numpy as jnp

from molora_jax.typing import Array, Float

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


def gate(gate_out: Float[Array, "F N"], up_out: Float[Array, "F N"], activation: str) -> Float[Array, "F N"]:
    """act(W_g x) ⊙ W_u x, the activation in fp32 (or wider) (Shazeer 2020, eq. 5)."""
    wide = gate_out.astype(jnp.promote_types(gate_out.dtype, jnp.float32))
    return ACTIVATIONS[activation](wide).astype(up_out.dtype) * up_out
