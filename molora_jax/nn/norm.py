"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx

from molora_jax.typing import Array, Float


def rms_norm(
    x: Float[Array, "*H D N"], weight: Float[Array, "D"], *, eps: float, offset: float = 0.0
) -> Float[Array, "*H D N"]:
    """x / rms(x) · (w + offset) over the features D, in fp32 (or wider), returned in x's dtype.

    Zhang & Sennrich 2019, eq. 4.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-2, keepdims=True) + eps)
    return (wide * scale * (weight.astype(wide.dtype) + offset)[:, None]).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Declares the weight [*stack, D] of a norm, at its identity (1 - offset)."""

    def __init__(self, width: int, *, offset: float = 0.0, stack=(), dtype):
        lead = ("layers",) * len(stack)
        self.weight = nnx.Param(jnp.full((*stack, width), 1.0 - offset, dtype), axes=(*lead, "norm"))
