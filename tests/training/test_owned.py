"""Batches that know the expert of each token."""

import numpy as np

from molora_jax.data.document import Document
from molora_jax.data.packing import assemble
from molora_jax.data.pipeline import Batches, Spec
from molora_jax.training.owned import OwnedBatches, owned


def _document(id: str, length: int) -> Document:
    return Document(id, np.arange(1, length + 1, dtype=np.int32), np.ones(length, np.float32))


def test_each_document_of_a_packed_row_has_its_own_expert():
    batch = assemble([[_document("a", 3), _document("b", 2)], [], [_document("c", 5)]], 6)
    got = owned(batch, {"a": 2, "b": 0, "c": 1})
    assert got.experts.tolist() == [[2, 2, 2, 0, 0, -1], [-1] * 6, [1, 1, 1, 1, 1, -1]]
    assert np.array_equal(got.tokens, batch.tokens)
    assert got.ids == batch.ids


def test_the_position_is_the_pipelines():
    documents = [_document(f"d{i}", 2 + i % 3) for i in range(7)]
    owner = {d.id: i % 2 for i, d in enumerate(documents)}
    make = lambda: OwnedBatches(Batches({"x": documents}, Spec(rows=2, length=6, seed=1)), owner)
    first = make()
    next(first)
    state, want = first.get_state(), next(first)
    again = make()
    again.set_state(state)
    got = next(again)
    assert np.array_equal(got.experts, want.experts)
    assert got.ids == want.ids
