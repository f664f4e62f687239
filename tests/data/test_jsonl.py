"""A user's own file: both kinds of lines, and one line of explanation for each that cannot be used."""

import json

import pytest

from molora_jax.config import UserError
from molora_jax.data import jsonl
from molora_jax.data.rows import Report
from molora_jax.data.testbed.vocabulary import tokenizer

PAIR = {"prompt": "calc:1 +1\n", "completion": "1+1=2 ->2"}
CHAT = {"messages": [{"role": "user", "content": "calc:1 +1"}, {"role": "assistant", "content": "1+1=2 ->2"}]}
BAD = [
    "{broken",
    "[1]",
    json.dumps({"prompt": "x"}),
    json.dumps(PAIR | {"completion": 2}),
    json.dumps({"messages": []}),
    json.dumps({"messages": [{"role": "user", "content": "x"}]}),
    json.dumps({"messages": [{"content": "x"}, {"role": "assistant", "content": "y"}]}),
    json.dumps(PAIR | {"completion": "1" * 200}),
    '{"prompt": "\\ud800", "completion": "x"}',
]


def write(path, lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_both_kinds_give_the_same_tokens(tmp_path):
    pair, chat = jsonl.load(write(tmp_path / "own.jsonl", [PAIR, CHAT | {"id": 7}]), tokenizer(), length=64)
    assert pair.tokens.tolist() == chat.tokens.tolist()
    assert pair.weights.tolist() == chat.weights.tolist()
    assert (pair.id, chat.id) == ("own/1", "7")


def test_malformed_lines_are_skipped_and_reported(tmp_path):
    path, report = write(tmp_path / "own.jsonl", [PAIR, *BAD, "", CHAT]), Report()
    assert len(jsonl.load(path, tokenizer(), length=64, report=report)) == report.used == 2
    assert [skip.line for skip in report.skipped] == list(range(2, 2 + len(BAD)))
    assert str(report.skipped[2]) == f"{path}:4: no 'completion'"
    assert "more than the 64 of a row" in str(report.skipped[7])


@pytest.mark.parametrize("line", BAD)
def test_strict_makes_them_errors(tmp_path, line):
    with pytest.raises(UserError, match=r"own.jsonl:2: .*; mend the row") as error:
        jsonl.load(write(tmp_path / "own.jsonl", [PAIR, line]), tokenizer(), length=64, strict=True)
    assert "\n" not in str(error.value)


def test_files_without_anything_usable(tmp_path):
    with pytest.raises(UserError, match="no usable line; the first problem: .*:1: no 'prompt'"):
        jsonl.load(write(tmp_path / "own.jsonl", [{}]), tokenizer(), length=64)
    with pytest.raises(UserError, match="no usable line$"):
        jsonl.load(write(tmp_path / "own.jsonl", []), tokenizer(), length=64)
    with pytest.raises(UserError, match="ends in .jsonl"):
        jsonl.load(tmp_path / "own.csv", tokenizer(), length=64)
    with pytest.raises(UserError, match="cannot read"):
        jsonl.load(tmp_path / "absent.jsonl", tokenizer(), length=64)
