"""Tables of a vocabulary, against the text of every token on its own."""

import pytest

from molora_jax.config import UserError
from molora_jax.text import lexicon
from molora_jax.text.tokenizer import Tokenizer
from tests.text import tiny


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    tok = getattr(tiny, request.param)()
    tok.add_tokens(["\n\n", " 42", "1234", "Wait", "³", "3"])
    return Tokenizer.load(tiny.write(tmp_path_factory.mktemp(request.param), tok))


def ids(tokenizer, *names) -> set[int]:
    return {tokenizer.backend.token_to_id(name) for name in names}


def test_ids_without_a_token_read_as_nothing(tokenizer):
    read = lexicon.texts(tokenizer, tokenizer.vocab + 3)
    assert len(read) == tokenizer.vocab + 3
    assert read[-3:] == ["", "", ""]
    assert read[tokenizer.backend.token_to_id("1234")] == "1234"
    assert len(lexicon.texts(tokenizer, 7)) == 7


def test_tokens_that_hold_a_text(tokenizer):
    held = lexicon.holding(tokenizer, tokenizer.vocab, "\n\n")
    assert set(held.nonzero()[0]) == ids(tokenizer, "\n\n")
    for text in ("no token is as long as this one", ""):
        with pytest.raises(UserError, match="delimiter: got .*, expected a text that some single token"):
            lexicon.holding(tokenizer, tokenizer.vocab, text)


def test_numbers(tokenizer):
    read = lexicon.numbers(tokenizer, tokenizer.vocab + 1)
    at = lambda name: read[tokenizer.backend.token_to_id(name)]
    assert [at(name) for name in (" 42", "1234", "³", "Wait")] == [42, -1, -1, -1]
    assert read[lexicon.single(tokenizer, "3")] == 3
    assert read[-1] == -1


def test_words_in_any_case(tokenizer):
    found = lexicon.words(tokenizer, tokenizer.vocab, {"wait": 2})
    assert set(found.nonzero()[0]) == ids(tokenizer, "Wait")
    assert found.max() == 2


def test_one_token_for_a_text(tokenizer):
    assert lexicon.single(tokenizer, "Wait") in ids(tokenizer, "Wait")
    with pytest.raises(UserError, match="tokenizer: got .* tokens for 'qqzz', expected a vocabulary with one token"):
        lexicon.single(tokenizer, "qqzz")
