"""Streamed text adds up to the one-shot decode, promptly and at a constant cost a token."""

import functools
import pathlib
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molora_jax.config import UserError
from molora_jax.text.stream import TextStream
from molora_jax.text.tokenizer import Tokenizer
from tests.text import tiny

KINDS = {
    "byte_level": tiny.byte_level,
    "llama": functools.partial(tiny.sentencepiece, "llama"),
    "gemma": functools.partial(tiny.sentencepiece, "gemma"),
    "metaspace": functools.partial(tiny.sentencepiece, "metaspace"),
}


@functools.cache
def load(kind: str) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.load(tiny.write(pathlib.Path(folder), KINDS[kind]()))


def stream(tok: Tokenizer, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """The pieces of every push and of the flush, and whether a stop string was met."""
    text = TextStream(tok, stop)
    pieces = [text.push(i) for i in ids]
    pieces.append(text.flush())
    return pieces, text.stopped


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The definition, one character at a time: the text before the stop string that is complete first."""
    for end in range(len(text) + 1):
        met = [s for s in stops if text[:end].endswith(s)]
        if met:
            return text[: end - max(map(len, met))], True
    return text, False


@st.composite
def streams(draw, kind):
    """Ids (any, or those of a text) and stop strings, most of them pieces of the text that the ids make."""
    tok = load(kind)
    any_ids = st.lists(st.integers(0, tok.vocab + 2), max_size=40)
    texts = st.lists(st.sampled_from(tiny.TEXT) | st.text(max_size=8), max_size=3).map("".join)
    ids = draw(any_ids | texts.map(lambda text: tok.encode(text, special=False)))
    text = tok.decode(ids)
    spans = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 5)).map(lambda s: text[s[0] : sum(s)])
    stops = draw(st.lists(spans | st.text("ab ▁\ufffd", max_size=3), max_size=3))
    return ids, tuple(s for s in stops if s)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_pieces_add_up_to_the_one_shot_decode_cut_at_the_first_stop(kind, data):
    ids, stops = data.draw(streams(kind))
    tok = load(kind)
    pieces, stopped = stream(tok, ids)
    assert ("".join(pieces), stopped) == (tok.decode(ids), False)
    pieces, stopped = stream(tok, ids, stops)
    assert ("".join(pieces), stopped) == cut(tok.decode(ids), stops)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", tiny.TEXT[:7])
def test_nothing_is_held_back_but_unfinished_characters(kind, text):
    tok = load(kind)
    ids = tok.encode(text, special=False)
    pieces, _ = stream(tok, ids)
    assert "".join(pieces) == tok.decode(ids)
    for n in range(len(ids) + 1):
        seen, settled = "".join(pieces[:n]), tok.decode(ids[:n]).rstrip("\ufffd")
        is_byte = n and kind != "byte_level" and tok.backend.id_to_token(ids[n - 1]).startswith("<0x")
        assert is_byte or seen == settled


def test_text_that_may_become_a_stop_string_waits():
    tok = load("byte_level")
    text = TextStream(tok, ("END", "ENOUGH"))
    letters = [tok.backend.token_to_id(c) for c in "aENxENDq"]
    assert [text.push(i) for i in letters] == ["a", "", "", "ENx", "", "", "", ""]
    assert text.stopped
    assert text.flush() == ""


def test_flush_returns_a_stop_string_that_was_not_completed():
    tok = load("byte_level")
    text = TextStream(tok, ("END",))
    assert text.push(tok.backend.token_to_id("E")) == ""
    assert text.flush() == "E"
    assert not text.stopped


def test_of_overlapping_stops_the_one_complete_first_cuts_whatever_the_tokens():
    assert cut(" sp", (" sp", "s")) == (" ", True)
    tok = load("byte_level")
    for split in ([" sp"], ["Ġ", "s", "p"]):
        ids = [tok.backend.token_to_id(name) for name in split]
        pieces, stopped = stream(tok, ids, (" sp", "s"))
        assert ("".join(pieces), stopped) == (" ", True)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_silent_wherever_they_stand(kind):
    tok = load(kind)
    words = tok.encode("the dog", special=False)
    ids = [i for word in words for i in (*sorted(tok.special), word)]
    assert "".join(stream(tok, ids)[0]) == tok.decode(words)


class Counting(Tokenizer):
    """Counts the tokens that it decodes."""

    total = 0

    def decode(self, ids, *, skip_special=True):
        Counting.total += len(ids)
        return super().decode(ids, skip_special=skip_special)


@pytest.mark.parametrize("kind", KINDS)
def test_cost_of_a_token_does_not_grow(kind):
    tok = load(kind)
    counting = Counting(**vars(tok))
    Counting.total = 0
    ids = [i % tok.vocab for i in range(0, 7 * 3000, 7)]
    stream(counting, ids, ("never met",))
    assert Counting.total <= 4 * len(ids)


@pytest.mark.parametrize("stop", ["END", ("",), ("a", 3)])
def test_bad_stop_strings_give_one_line(stop):
    with pytest.raises(UserError, match=r"^stream: got stop=.*, expected a tuple of strings that are not empty$"):
        TextStream(load("byte_level"), stop)
