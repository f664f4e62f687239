"""The definition: every token gathers its expert. Memory grows with N·R·(D+F); nothing here is chosen for speed."""

import jax.numpy as jnp

from pallas_kernels.routed_lora.layout import Banks, operand, product, sums


def hard(x, pair: Banks, ids, mult, *, with_rank: bool = False):
    """y_n = up_e (m_n ⊙ u_n) with u_n = down_e x_n, e = ids[n]; rows whose id is no expert are zero.

    Args:
      x: [N D].
      pair: the banks.
      ids: [N], an expert in [0, E) or anything else for none.
      mult: [N] or [N R], multiplies the rank space.
      with_rank: also return u [N R] (zero where there is no expert), else None.

    Returns:
      (y [N F] in the accumulator's dtype, u or None).
    """
    none = ((ids < 0) | (ids >= pair.experts))[:, None]
    expert = jnp.where(none[:, 0], 0, ids)
    d, f = pair.down_axes[1:], pair.up_axes[1:]
    u = product(f"nd,n{d}->nr", x, pair.down[expert], sums(x, pair))
    u = jnp.where(none, 0, u)
    h = u * mult.reshape(len(x), -1)
    y = product(f"nr,n{f}->nf", h.astype(operand(x, pair.up)), pair.up[expert], sums(x, pair))
    return jnp.where(none, 0, y), u if with_rank else None


def soft(x, pair: Banks, mult, rank_gate=None):
    """y_n = Σ_e m_ne · up_e (r_n ⊙ down_e x_n): [N F]; mult [N E], rank_gate [N R] or None."""
    h = product(f"nd,{pair.down_axes}->ner", x, pair.down, sums(x, pair)) * mult[:, :, None]
    h = h if rank_gate is None else h * rank_gate[:, None]
    return product(f"ner,{pair.up_axes}->nf", h.astype(operand(x, pair.up)), pair.up, sums(x, pair))
