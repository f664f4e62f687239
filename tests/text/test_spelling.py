"""Tokens as bytes: against the tokenizers' own decoding, and half characters against Python's decoder."""

import codecs

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molora_jax.config import UserError
from molora_jax.text import spelling
from molora_jax.text.spelling import Interpreter, Special, SpelledTokens, Spelling, pieces
from molora_jax.text.stream import TextStream
from molora_jax.text.tokenizer import Tokenizer
from tests.text import tiny

MAKE = {"byte_level": tiny.byte_level, "gemma": lambda: tiny.sentencepiece("gemma")}
END = {"byte_level": "<|im_end|>", "gemma": "</s>"}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("spelling")
    own = {kind: dict(tokenizer_config=dict(eos_token=END[kind])) for kind in MAKE}
    return {kind: Tokenizer.load(tiny.write(folder / kind, make(), **own[kind])) for kind, make in MAKE.items()}


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("text", tiny.TEXT[:7])
def test_tokens_spell_the_text_that_they_encode(loaded, kind, text):
    own = Spelling(loaded[kind])
    ids = own.encode([text])
    assert b"".join(map(own.spelled, ids)).decode("utf-8", "replace") == loaded[kind].decode(ids)
    assert ids == loaded[kind].encode(text, special=False)


@pytest.mark.parametrize("kind", MAKE)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_tokens_spell_what_the_tokenizer_decodes(loaded, kind, data):
    tok = loaded[kind]
    ids = data.draw(st.lists(st.integers(0, tok.vocab - 1), max_size=12))
    ids = [token for token in ids if tok.backend.id_to_token(token) != "<unk>"]
    text = "".join(piece for piece in pieces((Spelling(tok), i) for i in ids if i not in tok.special))
    strict = (
        kind == "byte_level" or "\ufffd" not in text
    )  # a run of bytes that is no UTF-8 is replaced as a whole there
    assert not strict or text == tok.decode(ids)


@settings(max_examples=300)
@given(st.binary(max_size=12))
def test_half_characters_are_those_that_python_waits_for(data):
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    state = spelling.WHOLE
    for at in range(len(data)):
        decoder.decode(data[at : at + 1])
        state = spelling.advance(state, data[at : at + 1])
        assert (state != spelling.WHOLE) == bool(decoder.getstate()[0])


@pytest.mark.parametrize("kind", MAKE)
def test_transitions_are_those_of_the_tokens_bytes(loaded, kind):
    own = Spelling(loaded[kind])
    assert own.transitions.shape == (own.vocab, spelling.STATES)
    for token in range(own.vocab):
        want = [spelling.advance(state, own.spelled(token)) for state in range(spelling.STATES)]
        if own.special(token):
            want = [spelling.WHOLE] * spelling.STATES
        np.testing.assert_array_equal(own.transitions[token], want)
    assert own.transitions.any()


def test_a_special_token_is_one_by_its_name_and_never_by_its_spelling(loaded):
    byte_level, gemma = (Spelling(loaded[kind]) for kind in MAKE)
    end = loaded["byte_level"].backend.token_to_id("<|im_end|>")
    spelled = byte_level.encode(["a<|im_end|>b"])
    assert end not in spelled
    assert pieces((byte_level, token) for token in spelled) == ["a<|im_end|>b"]
    written = [(byte_level, token) for token in (*byte_level.encode(["a"]), end, *byte_level.encode(["b"]))]
    assert pieces(written) == ["a", Special("<|im_end|>"), "b"]
    assert byte_level.encode(pieces(written)) == [token for _, token in written]
    assert gemma.encode(pieces(written)) == gemma.encode(["a", "b"])


def test_half_a_character_before_a_special_token_is_replaced(loaded):
    own = Spelling(loaded["byte_level"])
    half = own.encode(["€"])[0]
    end = loaded["byte_level"].backend.token_to_id("<|im_end|>")
    assert own.spelled(half) not in (b"", "€".encode())
    assert pieces([(own, half), (own, end)]) == ["\ufffd", Special("<|im_end|>")]


def test_the_text_of_two_writers_comes_in_whole_characters(loaded):
    both = Interpreter([loaded[kind] for kind in MAKE])
    first, second = "naïve €", " 日本 and ж"
    written = [(0, token) for token in both.spellings[0].encode([first])]
    written += [(1, token) for token in both.spellings[1].encode([second])]
    stream = TextStream(SpelledTokens(both.spellings))
    parts = [stream.push(each) for each in written]
    assert "".join(parts) + stream.flush() == first + second
    assert "\ufffd" not in "".join(parts)
    stream = TextStream(SpelledTokens(both.spellings), ("€ 日",))
    assert "".join(map(stream.push, written)) == "naïve "
    assert stream.stopped
    assert both.encode(1, written) == both.spellings[1].encode([first + second])


def test_a_tokenizer_that_puts_a_space_before_is_refused(tmp_path):
    tok = Tokenizer.load(tiny.write(tmp_path / "llama", tiny.sentencepiece("llama")))
    with pytest.raises(UserError, match="expected byte-level BPE or byte fallback without a space"):
        Spelling(tok)
