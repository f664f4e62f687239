"""Batches that know which expert each token belongs to."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from molora_jax.adapters.route import NONE
from molora_jax.data.batch import Batch
from molora_jax.data.pipeline import Batches
from molora_jax.typing import Int

_ARRAYS = ["tokens", "weights", "segments", "positions", "valid", "experts"]


@functools.partial(jax.tree_util.register_dataclass, data_fields=_ARRAYS, meta_fields=[], drop_fields=["ids"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class Owned(Batch):
    """A batch with the slot of each token's own expert; `NONE` for pads."""

    experts: Int[np.ndarray, "B T"]


class OwnedBatches(Iterator[Owned]):
    """The batches of a pipeline, each document's tokens with one expert.

    Args:
      batches: of documents.
      owner: slot by the document's id.
    """

    def __init__(self, batches: Batches, owner: Mapping[str, int]):
        self._batches, self._owner = batches, owner

    def __next__(self) -> Owned:
        return owned(next(self._batches), self._owner)

    def get_state(self) -> Any:
        """As the pipeline's."""
        return self._batches.get_state()

    def set_state(self, state: Any) -> None:
        """As the pipeline's."""
        self._batches.set_state(state)


def owned(batch: Batch, owner: Mapping[str, int]) -> Owned:
    """The batch with the expert of each document by its id."""
    most = max((len(row) for row in batch.ids), default=0)
    slots = np.full((len(batch.ids), most + 1), NONE, np.int32)  # by number in the row; 0 is what pads have
    for i, row in enumerate(batch.ids):
        slots[i, 1 : len(row) + 1] = [owner[id] for id in row]
    experts = np.take_along_axis(slots, np.asarray(batch.segments), axis=1)
    return Owned(**{field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}, experts=experts)
