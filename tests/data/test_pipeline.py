"""Batches are a function of the arguments, resume anywhere, and hold every document whole."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molora_jax.config import UserError
from molora_jax.data.document import Document, Mapped, from_example
from molora_jax.data.pipeline import Batches, Spec
from molora_jax.data.testbed.recipe import PRETRAINING, Stream
from molora_jax.data.testbed.vocabulary import tokenizer

grain = pytest.importorskip("grain", reason="grain is missing; pip install 'molora_jax[train]'")


def document(name: str, number: int, length: int) -> Document:
    tokens = np.full(length, 1 + number % 97, np.int32)
    return Document(f"{name}{number}", tokens, np.linspace(0, 1, length, dtype=np.float32))


def source(name: str, count: int, longest: int = 12) -> list[Document]:
    lengths = np.random.default_rng(count).integers(1, longest + 1, count)
    return [document(name, i, int(n)) for i, n in enumerate(lengths)]


def same(a, b):
    assert a.ids == b.ids
    for name in ("tokens", "weights", "segments", "positions", "valid"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def ids(batches) -> list[str]:
    return [id for batch in batches for row in batch.ids for id in row]


SOURCES = {"a": source("a", 230), "b": source("b", 70)}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_document_comes_once_an_epoch_and_whole(packed, shuffle):
    documents = {d.id: d for d in SOURCES["a"]}
    spec = Spec(rows=3, length=16, seed=0, epochs=1, shuffle=shuffle, packed=packed)
    batches = list(Batches({"a": SOURCES["a"]}, spec))
    assert sorted(ids(batches)) == sorted(documents)
    for batch in batches:
        assert batch.tokens.shape == batch.weights.shape == batch.valid.shape == (3, 16)
        assert (batch.tokens.dtype, batch.weights.dtype, batch.valid.dtype) == (np.int32, np.float32, bool)
        for b, row in enumerate(batch.ids):
            assert packed or len(row) <= 1
            at = 0
            for number, id in enumerate(row, 1):
                want = documents[id]
                here = slice(at, at + len(want))
                np.testing.assert_array_equal(batch.tokens[b, here], want.tokens)
                np.testing.assert_array_equal(batch.weights[b, here], want.weights)
                np.testing.assert_array_equal(batch.positions[b, here], np.arange(len(want)))
                assert (batch.segments[b, here] == number).all()
                assert batch.valid[b, here].all()
                at = here.stop
            for name in ("tokens", "weights", "positions", "segments", "valid"):
                assert not getattr(batch, name)[b, at:].any()


@settings(max_examples=12, deadline=None)
@given(
    before=st.integers(0, 60),
    between=st.integers(0, 5),
    packed=st.booleans(),
    epochs=st.sampled_from([None, 3]),
    window=st.integers(1, 3),
    hosts=st.sampled_from([(0, 1), (1, 2)]),
)
def test_a_saved_state_gives_the_same_batches(before, between, packed, epochs, window, hosts):
    if epochs is not None:
        hosts = (0, 1)
    spec = Spec(
        rows=2,
        length=16,
        seed=5,
        epochs=epochs,
        packed=packed,
        window=window,
        process_index=hosts[0],
        process_count=hosts[1],
    )
    batches = Batches(SOURCES, spec)
    for _ in range(before):
        next(batches, None)
    state = json.loads(json.dumps(batches.get_state()))
    expected = [next(batches, None) for _ in range(8)]
    for resumed in (Batches(SOURCES, spec), batches):
        for _ in range(between):
            next(resumed, None)
        resumed.set_state(state)
        assert resumed.get_state() == state
        for want in expected:
            got = next(resumed, None)
            assert (got is None) == (want is None)
            if want is not None:
                same(got, want)


def test_an_exhausted_pipeline_stays_so():
    batches = Batches({"a": source("a", 3)}, Spec(rows=2, length=12, seed=0, epochs=1))
    assert len(ids(batches)) == 3
    assert next(batches, None) is None
    state = batches.get_state()
    again = Batches({"a": source("a", 3)}, Spec(rows=2, length=12, seed=0, epochs=1))
    again.set_state(state)
    assert next(again, None) is None


def test_each_epoch_has_another_order_and_the_seed_decides():
    sources = {"a": source("a", 20)}
    order = ids(Batches(sources, Spec(rows=1, length=12, seed=1, epochs=3, packed=False)))
    epochs = [order[i : i + 20] for i in (0, 20, 40)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(d.id for d in sources["a"])] * 3
    assert len(set(map(tuple, epochs))) == 3
    assert order == ids(Batches(sources, Spec(rows=1, length=12, seed=1, epochs=3, packed=False)))
    assert order != ids(Batches(sources, Spec(rows=1, length=12, seed=2, epochs=3, packed=False)))
    plain = ids(Batches(sources, Spec(rows=1, length=12, seed=1, epochs=2, packed=False, shuffle=False)))
    assert plain == [d.id for d in sources["a"]] * 2


def test_hosts_share_the_order_of_one():
    spec = dict(rows=1, length=12, seed=1, packed=False)
    take = lambda **host: [
        next(batches).ids[0][0] for batches in [Batches(SOURCES, Spec(**spec, **host))] for _ in range(12)
    ]
    whole, first, second = take(), take(process_index=0, process_count=2), take(process_index=1, process_count=2)
    assert [id for pair in zip(first, second, strict=True) for id in pair][:12] == whole


def test_mixture_weights():
    spec = Spec(rows=4, length=12, seed=0, packed=False, weights={"a": 3.0, "b": 1.0})
    batches = Batches(SOURCES, spec)
    found = ids(next(batches) for _ in range(50))
    assert sum(id[0] == "b" for id in found) == pytest.approx(50, abs=1)


def test_a_mixture_ends_with_the_source_that_ends_first():
    spec = Spec(rows=4, length=12, seed=0, packed=False, epochs=2, weights={"a": 1.0, "b": 1.0})
    found = ids(Batches(SOURCES, spec))
    counts = [sum(id[0] == name for id in found) for name in "ab"]
    assert counts == pytest.approx([140, 140], abs=1)
    assert all(found.count(d.id) <= 2 for d in SOURCES["b"])


def test_packing_wastes_little():
    text = tokenizer()
    documents = Mapped(Stream(PRETRAINING, "train", 0, 3000), lambda example: from_example(text, example))
    batches = Batches({"testbed": documents}, Spec(rows=16, length=128, seed=0))
    filled = np.mean([next(batches).valid.mean() for _ in range(16)])
    assert filled > 0.9


def test_what_does_not_fit_names_the_document():
    batches = Batches({"a": [document("a", 0, 17)]}, Spec(rows=1, length=16, seed=0))
    with pytest.raises(UserError, match="a0 has 17 tokens, more than the 16 of a row; raise the length"):
        next(batches)


def test_a_state_of_another_pipeline_is_refused():
    spec = dict(rows=1, length=16)
    state = Batches(SOURCES, Spec(**spec, seed=0)).get_state()
    for other in (Batches(SOURCES, Spec(**spec, seed=1)), Batches({"a": SOURCES["a"]}, Spec(**spec, seed=0))):
        with pytest.raises(UserError, match="resume with those of the run"):
            other.set_state(state)


@pytest.mark.parametrize(
    ("sources", "weights", "match"),
    [
        ({}, None, "expected a positive one each"),
        (SOURCES, {"a": 1.0}, "expected a positive one each"),
        (SOURCES, {"a": 1.0, "b": 0.0}, "expected a positive one each"),
        ({"a": []}, None, "source a is empty"),
    ],
)
def test_sources_that_cannot_be_mixed(sources, weights, match):
    with pytest.raises(UserError, match=match):
        Batches(sources, Spec(rows=1, length=16, seed=0, weights=weights))


@pytest.mark.parametrize(
    "change",
    [dict(rows=0), dict(length=1), dict(epochs=0), dict(process_index=1), dict(epochs=1, process_count=2)],
)
def test_specs_that_make_no_sense(change):
    with pytest.raises(UserError, match="pipeline: "):
        Spec(**dict(rows=1, length=16, seed=0) | change)
