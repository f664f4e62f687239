"""A rectangle of training tokens."""

import dataclasses
import functools

import jax
import numpy as np

from molora_jax.typing import Bool, Float, Int

_ARRAYS = ["tokens", "weights", "segments", "positions", "valid"]


@functools.partial(jax.tree_util.register_dataclass, data_fields=_ARRAYS, meta_fields=[], drop_fields=["ids"])
@dataclasses.dataclass(frozen=True)
class Batch:
    """Documents packed into rows; `positions`, `valid` and `segments` are what `nn.layout.dense` takes.

    The arrays are numpy's on the host, jax's inside a step. The ids stay on the host: they are no leaves, and a batch
    that has been through a transformation has none.

    Attributes:
      tokens: pads are 0.
      weights: of the loss of predicting this token from those before it, so that position t goes with the logits of
        t - 1; 0 for pads and for the first token of a document.
      segments: number of the document in its row, from 1; 0 for pads.
      positions: of the token in its document, from 0; 0 for pads.
      valid: False for pads.
      ids: per row, the ids of its documents in order.
    """

    tokens: Int[np.ndarray, "B T"]
    weights: Float[np.ndarray, "B T"]
    segments: Int[np.ndarray, "B T"]
    positions: Int[np.ndarray, "B T"]
    valid: Bool[np.ndarray, "B T"]
    ids: tuple[tuple[str, ...], ...] = ()
