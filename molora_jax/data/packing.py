"""Documents to rows."""

from collections.abc import Sequence

import numpy as np

from molora_jax.data.batch import Batch
from molora_jax.data.document import Document


class Bins:
    """A number of rows that documents are put into, each where it leaves the least room.

    Args:
      rows: how many.
      length: tokens of a row.
      packed: whether a row may hold more than one document.
    """

    def __init__(self, rows: int, length: int, *, packed: bool = True):
        self.rows: list[list[Document]] = [[] for _ in range(rows)]
        self._room = np.full(rows, length)
        self._packed = packed

    def put(self, document: Document) -> bool:
        """Whether there was room."""
        left = self._room - len(document)
        row = int(np.argmin(np.where(left < 0, np.iinfo(left.dtype).max, left)))
        if left[row] < 0:
            return False
        self.rows[row].append(document)
        self._room[row] = self._room[row] - len(document) if self._packed else 0
        return True

    @property
    def room(self) -> int:
        """Tokens that still fit in."""
        return int(self._room.sum())


def assemble(rows: Sequence[Sequence[Document]], length: int) -> Batch:
    """The arrays of rows of documents; each row's documents must have at most `length` tokens together."""
    shape = (len(rows), length)
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    weights = np.zeros(shape, np.float32)
    for b, row in enumerate(rows):
        at = 0
        for number, document in enumerate(row, 1):
            here = slice(at, at + len(document))
            tokens[b, here] = document.tokens
            weights[b, here] = document.weights
            segments[b, here] = number
            positions[b, here] = np.arange(len(document))
            at += len(document)
    ids = tuple(tuple(document.id for document in row) for row in rows)
    return Batch(tokens, weights, segments, positions, segments > 0, ids)
