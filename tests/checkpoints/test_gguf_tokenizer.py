"""Tokenizers rebuilt from GGUF metadata agree with the definitions of the two algorithms."""

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from molora_jax.checkpoints import gguf_tokenizer
from molora_jax.config import UserError
from tests.checkpoints import tiny

TEXTS = [
    "",
    "hello hell he",
    " leading and trailing ",
    "two  spaces\n\n\ttabs\r\n",
    "naïve e\u0301 日本語 Ёлка 👩‍👩‍👧 \u200b\x00",
    "1234567 a1b22 3.14",
    "def f(x):\n    return x**2  # ok",
    "<|bos|>hello<tool><|eot|> <|eot",
]


def byte_level(pre: str, merges: list[str], **meta):
    """A tokenizer of the 256 bytes and what the merges make."""
    made = list(dict.fromkeys(merge.replace(" ", "") for merge in merges))
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + made
    values = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges} | meta
    return gguf_tokenizer.build({f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None})


def pieces(tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text, add_special_tokens=False).tokens


@pytest.mark.parametrize("pre", ["gpt-2", "default", None, "smollm", "llama-bpe", "qwen2"])
def test_byte_level_text_comes_back(pre):
    meta = tiny.vocabulary() | {"tokenizer.ggml.pre": pre}
    tokenizer = gguf_tokenizer.build({key: value for key, value in meta.items() if value is not None})
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        expected = text.replace("e\u0301", "é") if pre == "qwen2" else text  # Qwen composes characters (NFC)
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected


# What each vocabulary may join: digits, spaces before a digit, letters and the space before them.
JOINS = ["Ġ Ġ", "1 2", "12 3", "Ċ Ċ", "Ġ 1", "' s", "a b", "Ġ ab", "Ġ ."]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "123123", ["123", "123"]),
        ("smollm", "123123", ["1", "2", "3", "1", "2", "3"]),
        ("qwen2", "123123", ["1", "2", "3", "1", "2", "3"]),
        ("llama-bpe", "1231231", ["123", "123", "1"]),
        ("gpt-2", " 1", ["Ġ1"]),
        ("smollm", " 1", ["Ġ", "1"]),
        ("llama-bpe", " 1", ["Ġ", "1"]),
        # A run of spaces keeps its last one for the word behind it, but a digit is no such word to SmolLM.
        ("gpt-2", "a  1", ["a", "Ġ", "Ġ1"]),
        ("smollm", "a  1", ["a", "ĠĠ", "1"]),
        ("smollm", "a  ab", ["a", "Ġ", "Ġab"]),
        ("gpt-2", "a's'S", ["a", "'s", "'", "S"]),
        ("llama-bpe", ".ab", [".", "ab"]),
        ("llama-bpe", " .\n\n", ["Ġ.", "ĊĊ"]),
        ("gpt-2", "\n\na", ["Ċ", "Ċ", "a"]),
        ("qwen2", "\n\na", ["ĊĊ", "a"]),
    ],
)
def test_text_is_cut_as_the_vocabulary_was_made(pre, text, expected):
    assert pieces(byte_level(pre, JOINS), text) == expected


def test_a_whole_word_of_llama3_needs_no_merges():
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["ab", "Ġxyz"]
    for pre, expected in (("llama-bpe", ["Ġxyz"]), ("gpt-2", ["Ġ", "x", "y", "z"])):
        assert pieces(byte_level(pre, ["a b"], tokens=tokens), " xyz") == expected


def test_added_tokens_stay_whole_and_only_control_tokens_are_special():
    tokenizer = gguf_tokenizer.build(tiny.vocabulary())
    assert pieces(tokenizer, "he<|bos|><tool>ll") == ["he", "<|bos|>", "<tool>", "ll"]
    ids = tokenizer.encode("he<|bos|><tool>ll").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he<tool>ll"


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        ({}, ["he"]),
        ({"add_bos_token": True}, ["<|bos|>", "he"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<|bos|>", "he", "<|eos|>"]),
        ({"add_eos_token": True}, ["he", "<|eos|>"]),
        ({"pre": "llama-bpe"}, ["<|bos|>", "he"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["he"]),
    ],
)
def test_tokens_around_a_text(meta, expected):
    values = tiny.vocabulary() | {f"tokenizer.ggml.{key}": value for key, value in meta.items()}
    assert gguf_tokenizer.build(values).encode("he").tokens == expected
    config, _ = gguf_tokenizer.configs(values)
    assert config["add_bos_token"] == (expected[0] == "<|bos|>")
    assert config["add_eos_token"] == (expected[-1] == "<|eos|>")


def sentencepiece(seed: int, *, prefix: bool, user=()):
    """A random SentencePiece vocabulary in which every piece has one pair that joins to it: metadata and scores."""
    rng = np.random.default_rng(seed)
    pieces = list("▁abcdeé漢")
    while len(pieces) < 60:
        piece = "".join(rng.choice(pieces, 2))
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        if piece in pieces or piece == "▁▁" or sum(a in pieces and b in pieces for a, b in splits) != 1:
            continue
        if not any(piece in (p[: len(piece)], p[-len(piece) :]) for p in pieces):  # else p had a second pair
            pieces.append(piece)
    scores = {piece: float(score) for piece, score in zip(pieces, rng.permutation(len(pieces)), strict=True)}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *user, *pieces]
    kinds = [2, 3, 3] + [6] * 256 + [4] * len(user) + [1] * len(pieces)
    meta = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [scores.get(token, -1000.0) for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    return meta, scores


def joined_by_score(text: str, scores: dict[str, float], prefix: bool) -> list[str]:
    """SentencePiece's definition: join the neighbours that make the best piece, the leftmost first, until none do."""
    parts = list((" " if prefix and text else "") + text)
    parts = ["▁" if part == " " else part for part in parts]
    while True:
        found = [(scores[a + b], -i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in scores]
        if not found:
            break
        at = -max(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    known = [[part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [token for tokens in known for token in tokens]


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_sentencepiece_joins_the_best_pair_first(seed, prefix):
    meta, scores = sentencepiece(seed, prefix=prefix)
    tokenizer, rng, joins = gguf_tokenizer.build(meta), np.random.default_rng(seed + 100), 0
    for _ in range(400):
        text = "".join(rng.choice(list("abcdeé漢 " * 4 + "\nZ👍"), rng.integers(1, 30)))
        expected = joined_by_score(text, scores, prefix)
        assert pieces(tokenizer, text) == expected
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
        joins += sum(len(token) - 1 for token in expected if token in scores)
    assert joins > 200


def test_runs_of_spaces_that_are_stored_as_spaces():
    """Gemma: user-defined runs, whose scores say nothing, come before all other pieces."""
    meta, scores = sentencepiece(0, prefix=False, user=("  ", "   ", "\n\n", "<x>"))
    tokenizer = gguf_tokenizer.build(meta)
    assert pieces(tokenizer, "a   a  é") == ["a", "▁▁▁", "a", "▁▁", "é"]
    assert pieces(tokenizer, "\n\n\n<x>") == ["\n\n", "<0x0A>", "<x>"]
    assert tokenizer.decode(tokenizer.encode("   a\n\n  <x>").ids) == "   a\n\n  <x>"
    assert tokenizer.token_to_id("▁▁") == meta["tokenizer.ggml.tokens"].index("  ")


def test_sentencepiece_adds_bos_unless_told_otherwise():
    meta, _ = sentencepiece(1, prefix=True)
    assert gguf_tokenizer.build(meta).encode("a").tokens[0] == "<s>"
    assert gguf_tokenizer.build(meta | {"tokenizer.ggml.add_bos_token": False}).encode("a").tokens[0] != "<s>"


def test_bytes_written_as_text_are_text():
    meta, _ = sentencepiece(2, prefix=False)
    assert "<0x41>" not in pieces(gguf_tokenizer.build(meta), "<0x41>")


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        ({"eot_token_id": None}, 260),
        ({}, [260, 261]),
        ({"eom_token_id": 5}, [260, 261, 5]),
        ({"eot_token_id": 260}, 260),
    ],
)
def test_tokens_that_end_a_generation(meta, expected):
    values = tiny.vocabulary() | {f"tokenizer.ggml.{key}": value for key, value in meta.items()}
    _, generation = gguf_tokenizer.configs({key: value for key, value in values.items() if value is not None})
    assert generation["eos_token_id"] == expected


def test_the_end_of_a_turn_is_known_by_its_text():
    """Files of chat models often name the end of a text alone, as those of Gemma 3 and Llama 3 do."""
    values = {key: value for key, value in tiny.vocabulary().items() if key != "tokenizer.ggml.eot_token_id"}
    tokens, kinds = list(values["tokenizer.ggml.tokens"]), list(values["tokenizer.ggml.token_type"])
    more = {"tokenizer.ggml.tokens": [*tokens, "<end_of_turn>", "<|eot_id|>"]}
    more["tokenizer.ggml.token_type"] = [*kinds, 3, 1]  # one that is written as plain text ends nothing
    _, generation = gguf_tokenizer.configs(values | more)
    assert generation["eos_token_id"] == [260, len(tokens)]


@pytest.mark.parametrize(
    ("meta", "pre"),
    [
        ({}, "default"),
        ({"general.architecture": "qwen2"}, "qwen2"),
        ({"tokenizer.ggml.tokens": ["a", "<|begin_of_text|>"]}, "llama-bpe"),
        ({"general.architecture": "qwen2", "tokenizer.ggml.pre": "gpt-2"}, "gpt-2"),
    ],
)
def test_a_file_that_does_not_say_how_text_is_cut_is_known_by_the_rest(meta, pre):
    assert gguf_tokenizer._pre({"tokenizer.ggml.tokens": ["a"]} | meta) == pre


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        ({"model": "bert"}, "got tokenizer.ggml.model 'bert', expected 'gpt2' or 'llama'"),
        ({"pre": "chatglm-bpe"}, "got tokenizer.ggml.pre 'chatglm-bpe', expected one of llama-bpe"),
        ({"tokens": []}, "without tokenizer.ggml.tokens"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, "got 'a' 2 times"),
        ({"token_type": [1, 1]}, "got 2 tokenizer.ggml.token_type for 263 tokens"),
        ({"scores": [1.0]}, "got 1 tokenizer.ggml.scores for 263 tokens"),
        ({"merges": ["zz y"]}, "merges that do not fit the tokens"),
        ({"merges": ["h"]}, "merges that do not fit the tokens"),
        ({"bos_token_id": 263}, "got tokenizer.ggml.bos_token_id 263, expected one below 263"),
        ({"model": "llama", "remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
    ],
)
def test_bad_metadata_ends_in_one_line(meta, expected):
    values = tiny.vocabulary() | {f"tokenizer.ggml.{key}": value for key, value in meta.items()}
    with pytest.raises(UserError) as caught:
        gguf_tokenizer.build({key: value for key, value in values.items() if value is not None})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
