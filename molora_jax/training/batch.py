"""What a training step reads: a rectangle of tokens, and how the loss is laid over it."""

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp

from molora_jax.nn.layout import Dense, dense
from molora_jax.typing import Array, Bool, Float, Int

_ARRAYS = ["tokens", "weights", "segments", "positions", "valid"]


class TokenBatch(Protocol):
    """Any registered dataclass with these arrays, as `Batch` or that of the data pipeline."""

    tokens: Int[Array, "B T"]
    weights: Float[Array, "B T"]
    segments: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    valid: Bool[Array, "B T"]


@functools.partial(jax.tree_util.register_dataclass, data_fields=_ARRAYS, meta_fields=[], drop_fields=["ids"])
@dataclasses.dataclass(frozen=True)
class Batch:
    """The smallest `TokenBatch`; made of bare tokens by `batch`.

    Attributes:
      weights: of the loss of predicting this token from those before it: position t goes with the logits of t - 1;
        0 for pads and for the first token of a document.
      segments, positions, valid: as `nn.layout.dense` takes them.
      ids: what the rows are called when something is wrong with them; they stay on the host.
    """

    tokens: Int[Array, "B T"]
    weights: Float[Array, "B T"]
    segments: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    valid: Bool[Array, "B T"]
    ids: tuple = ()


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


def layout(batch: TokenBatch) -> Dense:
    """How its B·T tokens fall into rows."""
    return Dense(batch.tokens.shape, batch.positions, batch.valid, batch.segments)


def next_tokens(batch: TokenBatch) -> tuple[Int[Array, "N"], Float[Array, "N"]]:
    """The token that each position predicts, and its weight: (5 6 7), (0 1 1) gives (6 7 0), (1 1 0)."""
    shift = lambda leaf: jnp.pad(leaf[:, 1:], ((0, 0), (0, 1))).reshape(-1)
    return shift(batch.tokens), shift(batch.weights)
