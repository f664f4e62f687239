"""The tokenizer that the package carries."""

import json
import string

from molora_jax.data.testbed import vocabulary
from molora_jax.data.testbed.recipe import PRETRAINING, Stream
from molora_jax.text.chat import render


def test_the_shipped_file_is_what_build_gives():
    shipped = json.loads((vocabulary.FOLDER / "tokenizer.json").read_text())
    assert json.loads(vocabulary.build().to_str())["model"] == shipped["model"]


def test_size_and_special_tokens():
    text = vocabulary.tokenizer()
    assert text.vocab <= vocabulary.SIZE == 512
    assert (text.bos_token, text.eos_token) == ("<|bos|>", "<|eos|>")
    assert {text.pad, text.bos, *text.eos} <= text.special
    assert text.encode("calc") == [text.bos, *text.encode("calc", special=False)]


def test_every_word_and_every_digit_is_one_token():
    text = vocabulary.tokenizer()
    for word in vocabulary.words():
        assert len(text.encode(word, special=False)) == 1
    assert len(text.encode("1234", special=False)) == 4
    assert len(text.encode(" k f m", special=False)) == 3


def test_any_text_survives():
    text = vocabulary.tokenizer()
    for sample in [
        string.printable,
        "naïve 日本 🙂",
        "",
        " a\n b\n",
        *[e.prompt for e in Stream(PRETRAINING, "test", 0, 20)],
    ]:
        assert text.decode(text.encode(sample)) == sample


def test_prompt_and_completion_meet_at_a_token():
    text = vocabulary.tokenizer()
    for example in Stream(PRETRAINING, "train", 0, 200):
        parts = text.encode(example.prompt) + text.encode(example.completion, special=False)
        assert text.encode(example.prompt + example.completion) == parts


def test_chat_template_gives_the_prompt():
    text = vocabulary.tokenizer()
    messages = [dict(role="user", content="calc:1 +1")]
    names = dict(bos_token=text.bos_token, eos_token=text.eos_token)
    assert text.encode(render(text.chat_template, messages, **names)) == text.encode("calc:1 +1\n")
    answered = [*messages, dict(role="assistant", content="1+1=2 ->2")]
    assert render(text.chat_template, answered, **names).endswith("1+1=2 ->2<|eos|>")
