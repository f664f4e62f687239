"""Dense projections in the layout of HF files: weights are [F, D], out by in."""

import jax
import jax.numpy as jnp
from flax import nnx

from molora_jax.typing import Array, Float


def linear(
    x: Float[Array, "*N D"], weight: Float[Array, "F D"], bias: Float[Array, "F"] | None = None, *, out_dtype=None
):
    """y = x Wᵀ + b, accumulated in fp32 (or wider), returned in `out_dtype` (by default x's): [*N, F].

    XLA's CPU matmul is 1.3 to 1.6 × faster on a few rows when the weight is the left operand
    (`experiments/bench_decode.py` prints it), so the product is written F-major there and transposed back.
    """
    acc = jnp.promote_types(x.dtype, jnp.float32)
    if x.ndim == 2 and x.shape[0] > 1 and jax.default_backend() == "cpu":
        y = jnp.einsum("fd,nd->fn", weight, x, preferred_element_type=acc).T
    else:
        y = jnp.einsum("...d,fd->...f", x, weight, preferred_element_type=acc)
    if bias is not None:
        y = y + bias.astype(acc)
    return y.astype(out_dtype or x.dtype)


class Linear(nnx.Module):
    """Declares a projection; `stack` copies of it, one a layer, lie on a leading axis.

    Attributes:
      weight: [*stack, F, D], normal with variance 1/D.
      bias: [*stack, F] zeros, or absent.
    """

    def __init__(self, d_in: int, d_out: int, *, axes: tuple[str, str], rngs: nnx.Rngs, bias=False, stack=(), dtype):
        lead = ("layers",) * len(stack)
        init = jax.random.normal(rngs.params(), (*stack, d_out, d_in), dtype) * d_in**-0.5
        self.weight = nnx.Param(init, axes=(*lead, *axes))
        if bias:
            self.bias = nnx.Param(jnp.zeros((*stack, d_out), dtype), axes=(*lead, axes[0]))

    def __call__(self, x: Float[Array, "*N D"]) -> Float[Array, "*N F"]:
        bias = getattr(self, "bias", None)
        return linear(x, self.weight[...], None if bias is None else bias[...])
