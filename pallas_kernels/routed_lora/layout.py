"""The two banks as one operation sees them: the gradient of x is the forward operation with the banks exchanged.

N tokens · D width in · F width out · E experts · R rank. The forward operation goes down through a [E R D] and up
through b [E F R]; its transpose goes down through b and up through a. Axis strings name the axes of each bank for
einsum, `d` being the width that is contracted and `f` the width that comes out.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.common import accumulator


@dataclasses.dataclass(frozen=True)
class Banks:
    """A pair of stacked factors, `down` to the rank space and `up` out of it, each with its axes."""

    down: jax.Array
    up: jax.Array
    down_axes: str
    up_axes: str

    @property
    def experts(self) -> int:
        return self.down.shape[0]

    @property
    def rank(self) -> int:
        return self.down.shape[self.down_axes.index("r")]

    @property
    def width_in(self) -> int:
        return self.down.shape[self.down_axes.index("d")]

    @property
    def width_out(self) -> int:
        return self.up.shape[self.up_axes.index("f")]


def banks(a, b, rank_major: bool = False, *, transposed: bool = False) -> Banks:
    """The pair of the forward operation, or of its transpose; b is [E R F] if `rank_major`, else [E F R]."""
    if transposed:
        return Banks(b, a, "erd" if rank_major else "edr", "erf")
    return Banks(a, b, "erd", "erf" if rank_major else "efr")


def rank_first(pair: Banks) -> tuple[jax.Array, jax.Array]:
    """Both banks with the rank before the width, [E R D] and [E R F], which tile without padding on TPU and GPU."""
    down = pair.down if pair.down_axes == "erd" else pair.down.swapaxes(1, 2)
    up = pair.up if pair.up_axes == "erf" else pair.up.swapaxes(1, 2)
    return down, up


def sums(x, pair: Banks):
    """The dtype of everything that is summed."""
    return accumulator(x.dtype, pair.down.dtype, pair.up.dtype)


def operand(x, bank):
    """The dtype in which x, or the rank space it made, meets a bank: bf16 stays bf16, though its sums are fp32."""
    return jnp.promote_types(x.dtype, bank.dtype)


def product(spec: str, x, y, acc):
    """einsum of two operands in their common dtype, summed in `acc`; fp32 operands are not cut to bf16 or tf32."""
    common = operand(x, y)
    precision = jax.lax.Precision.HIGHEST if common in (jnp.float32, jnp.float64) else None
    return jnp.einsum(spec, x.astype(common), y.astype(common), precision=precision, preferred_element_type=acc)
