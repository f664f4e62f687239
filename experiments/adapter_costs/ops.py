"""Other ways to give each token the update of its own expert, in plain XLA: the op without a kernel.

All take x [N D], the banks A [E R D] and B [E R F], the expert of each token [N] and its scale [E], and give [N F].
"""

import jax
import jax.numpy as jnp


def one_hot(x, a, b, ids, scale):
    """Einsums over a one-hot expert axis, as LoRA is served on TPU by vLLM's backend; every token pays for all E."""
    chosen = jax.nn.one_hot(ids, len(scale), dtype=x.dtype)
    low = jnp.einsum("nd,ne,erd->nr", x, chosen, a)
    return jnp.einsum("nr,ne,erf->nf", low, chosen * scale, b)


def concatenated(x, a, b, ids, scale):
    """All ranks as one low-rank matrix, masked between its factors: two plain products of width E·R."""
    experts, rank, _ = a.shape
    low = (x @ a.reshape(experts * rank, -1).T).reshape(-1, experts, rank)
    low = low * (jax.nn.one_hot(ids, experts, dtype=x.dtype) * scale)[:, :, None]
    return low.reshape(-1, experts * rank) @ b.reshape(experts * rank, -1)


def ragged_dot(x, a, b, ids, scale):
    """`jax.lax.ragged_dot` on tokens sorted by expert; sorting and its inverse count, transposing A does not."""
    order = jnp.argsort(ids)
    sizes = jnp.bincount(ids, length=len(scale))
    low = jax.lax.ragged_dot(x[order], a, sizes)
    y = jax.lax.ragged_dot(low, b, sizes) * scale[ids[order]][:, None]
    return jnp.zeros_like(y).at[order].set(y)
