"""Low-rank adaptation of one projection, and its kin: rsLoRA, DoRA and the adapter's own bias.

One convention throughout, that of PEFT files: A is [R, D], B is [F, R], and the update of y = W x + β is
scale · (B A x + bias) (Hu et al. 2021, eq. 3). Tokens are rows, as in a notebook.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from molora_jax.typing import Array, Float


def scaling(alpha: float, rank: int, *, rslora: bool = False) -> float:
    """α/R (Hu et al. 2021, §4.1), or the rank-stabilised α/√R (Kalajdzievski 2023, eq. 4)."""
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def init(
    key: Array,
    d_in: int,
    d_out: int,
    rank: int,
    *,
    method: Literal["kaiming", "gaussian"] = "kaiming",
    dtype=jnp.float32,
) -> tuple[Float[Array, "R D"], Float[Array, "F R"]]:
    """A and B of an adapter that changes nothing yet: B is zero.

    `kaiming` draws A from U(-1/√D, 1/√D), He's uniform rule with negative slope √5, PEFT's default;
    `gaussian` from N(0, 1/R²).
    """
    if method == "kaiming":
        a = jax.random.uniform(key, (rank, d_in), dtype, -(d_in**-0.5), d_in**-0.5)
    else:
        a = jax.random.normal(key, (rank, d_in), dtype) / rank
    return a, jnp.zeros((d_out, rank), dtype)


def delta(
    x: Float[Array, "*N D"],
    a: Float[Array, "R D"],
    b: Float[Array, "F R"],
    scale: float,
    bias: Float[Array, "F"] | None = None,
    *,
    out_dtype=None,
) -> Float[Array, "*N F"]:
    """scale · (B A x + bias), accumulated in fp32 (or wider), returned in `out_dtype` (by default x's)."""
    acc = jnp.promote_types(x.dtype, jnp.float32)
    update = _product(_product(x, a, acc), b, acc)
    if bias is not None:
        update = update + bias.astype(acc)
    return (scale * update).astype(out_dtype or x.dtype)


def norms(weight: Float[Array, "F D"], a: Float[Array, "R D"], b: Float[Array, "F R"], scale: float):
    """‖W + scale·B A‖ over D, in fp32 (or wider): [F].

    The weight-decomposed norm of Liu et al. 2024 (DoRA), eq. 5; their columns are the rows of this layout.
    """
    acc = jnp.promote_types(weight.dtype, jnp.float32)
    product = jnp.einsum("fr,rd->fd", b, a, preferred_element_type=acc)
    return jnp.linalg.norm(weight.astype(acc) + scale * product, axis=-1)


def apply(
    x: Float[Array, "*N D"],
    weight: Float[Array, "F D"],
    a: Float[Array, "R D"],
    b: Float[Array, "F R"],
    scale: float,
    *,
    base_bias: Float[Array, "F"] | None = None,
    bias: Float[Array, "F"] | None = None,
    magnitude: Float[Array, "F"] | None = None,
) -> Float[Array, "*N F"]:
    """One adapted projection, accumulated in fp32 (or wider), returned in x's dtype.

    Plain: W x + β + scale · (B A x + bias). With a magnitude m (DoRA, Liu et al. 2024, eq. 5):
    β + m/n ⊙ (W x + scale · B A x), n = ‖W + scale·B A‖.

    Gradients are PEFT's: the whole norm n is detached (Liu et al. 2024, §4.3), as to W, A and B alike; A and B receive
    theirs through B A x alone, and m through the quotient.

    Args:
      base_bias: β, of the projection itself. A magnitude does not touch it.
      bias: of the adapter (PEFT's `lora_bias`), scaled like the product; not defined together with a magnitude.
    """
    acc = jnp.promote_types(x.dtype, jnp.float32)
    y = _product(x, weight, acc) + delta(x, a, b, scale, bias, out_dtype=acc)
    if magnitude is not None:
        y = y * (magnitude.astype(acc) / jax.lax.stop_gradient(norms(weight, a, b, scale)))
    if base_bias is not None:
        y = y + base_bias.astype(acc)
    return y.astype(x.dtype)


def _product(x: Float[Array, "*N D"], weight: Float[Array, "F D"], acc) -> Float[Array, "*N F"]:
    return jnp.einsum("...d,fd->...f", x, weight, preferred_element_type=acc)


def fold(
    weight: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    scale: float,
    magnitude: np.ndarray | None = None,
    *,
    transposed: bool = False,
) -> np.ndarray:
    """The one weight that does what `apply` does: W + scale·B A, its rows rescaled to `magnitude` where there is one.

    On the host, in fp32 (or wider); the caller rounds the result, once.

    Args:
      weight: [F, D], or [D, F] if `transposed`, as an embedding's table is (D one-hot tokens in, F features out).
    """
    acc = np.promote_types(weight.dtype, np.float32)
    left, right, axis = (a.T, b.T, 0) if transposed else (b, a, 1)
    full = weight.astype(acc) + acc.type(scale) * (left.astype(acc, order="C") @ right.astype(acc, order="C"))
    if magnitude is None:
        return full
    return full * (np.expand_dims(magnitude.astype(acc), axis) / np.linalg.norm(full, axis=axis, keepdims=True))


class LoRA(nnx.Module):
    """The adapter of one projection, for use by itself: `y = lora(x, weight, bias)`.

    The projection's own weight stays with the caller, frozen; what `nnx.LoRAParam` selects is all that trains.

    Attributes:
      a, b: [R, D] and [F, R].
      scale: α/R or α/√R.
      magnitude: [F], at its identity ‖W‖; only when `dora` gave the weight W [F, D] to decompose.
      bias: [F] zeros; only when asked for.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        rank: int,
        *,
        alpha: float,
        rngs: nnx.Rngs,
        rslora: bool = False,
        bias: bool = False,
        dora: Float[Array, "F D"] | None = None,
        method: Literal["kaiming", "gaussian"] = "kaiming",
        dtype=jnp.float32,
    ):
        a, b = init(rngs.params(), d_in, d_out, rank, method=method, dtype=dtype)
        self.a, self.b = nnx.LoRAParam(a), nnx.LoRAParam(b)
        self.scale = scaling(alpha, rank, rslora=rslora)
        if bias:
            self.bias = nnx.LoRAParam(jnp.zeros(d_out, dtype))
        if dora is not None:
            self.magnitude = nnx.LoRAParam(norms(dora, a, b, self.scale).astype(dtype))

    def __call__(self, x: Float[Array, "*N D"], weight: Float[Array, "F D"], bias: Float[Array, "F"] | None = None):
        own = {name: getattr(self, name)[...] for name in ("bias", "magnitude") if hasattr(self, name)}
        return apply(x, weight, self.a[...], self.b[...], self.scale, base_bias=bias, **own)
