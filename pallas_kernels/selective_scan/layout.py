"""What every backend takes, and how sizes are padded."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common import accumulator


class Operands(NamedTuple):
    """The operands of the bare recurrence, pads already neutral.

    States lie with channels last, so that channels fill the vector lanes of every platform. Zero is neutral at the end
    of every axis: a token with dt = u = 0 keeps the state, and a channel or state without input stays at zero.

    Attributes:
      u: [B T C] inputs.
      dt: [B T C] step sizes.
      A: [N C].
      Bm: [B T N].
      Cm: [B T N].
      h0: [B N C] state before the first token.
      reset: [B T], true where a token forgets the state before it; or None.
    """

    u: jax.Array
    dt: jax.Array
    A: jax.Array
    Bm: jax.Array
    Cm: jax.Array
    h0: jax.Array
    reset: jax.Array | None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, T, C, N."""
        return *self.u.shape, self.A.shape[0]

    @property
    def acc(self) -> jnp.dtype:
        """The dtype of the state, of sums, and of everything that leaves the recurrence."""
        return accumulator(*(x.dtype for x in self[:6]))

    def like(self, **grads: jax.Array) -> "Operands":
        """Cotangents by name, each in the dtype of its operand; reset has none."""
        return Operands(**{name: grad.astype(getattr(self, name).dtype) for name, grad in grads.items()}, reset=None)


def pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    """x with zeros after the end of an axis, up to `size`."""
    missing = size - x.shape[axis]
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths)


def even_split(size: int, limit: int) -> tuple[int, int]:
    """(count, width) of the fewest equal parts, of at most `limit` each (and at least 1), that hold `size`."""
    count = -(-size // max(limit, 1))
    return count, -(-size // count)
