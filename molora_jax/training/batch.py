"""Batches of bare tokens, and what a training step reads of any batch: its layout, and what each token predicts."""

import jax.numpy as jnp

from molora_jax.data.batch import Batch
from molora_jax.nn.layout import Dense, dense
from molora_jax.typing import Array, Bool, Float, Int


def batch(
    tokens: Int[Array, "B T"],
    weights: Float[Array, "B T"] | None = None,
    *,
    valid: Bool[Array, "B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    ids: tuple = (),
) -> Batch:
    """Rows as a batch; by default every token counts but the first of each document."""
    laid = dense(*tokens.shape, valid=valid, segments=segments)
    if weights is None:
        weights = (laid.valid & (laid.positions > 0)).astype(jnp.float32)
    return Batch(jnp.asarray(tokens), jnp.asarray(weights), laid.segments, laid.positions, laid.valid, ids)


def layout(batch: Batch) -> Dense:
    """How its B·T tokens fall into rows."""
    return Dense(batch.tokens.shape, batch.positions, batch.valid, batch.segments)


def next_tokens(batch: Batch) -> tuple[Int[Array, "N"], Float[Array, "N"]]:
    """The token that each position predicts, and its weight: (5 6 7), (0 1 1) gives (6 7 0), (1 1 0)."""
    shift = lambda leaf: jnp.pad(leaf[:, 1:], ((0, 0), (0, 1))).reshape(-1)
    return shift(batch.tokens), shift(batch.weights)
