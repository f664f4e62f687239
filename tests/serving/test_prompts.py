"""Prompts from flags and files, with the experts that they ask for."""

import json

import pytest

from molora_jax.config import UserError
from molora_jax.serving.prompts import Prompt, read_prompts


def read(texts=(), file=None, *, chat=False, system=None, **kw):
    return read_prompts(texts, None if file is None else str(file), chat=chat, system=system, **kw)


def test_flags_come_before_a_files_lines(tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("two\n\n  three\n", "utf-8")
    assert read(["one"], file) == [Prompt("one"), Prompt("two"), Prompt("  three")]


def test_a_line_may_name_its_experts(tmp_path):
    file = tmp_path / "p.jsonl"
    rows = [
        {"prompt": "a", "adapter": "x"},
        {"messages": [{"role": "user", "content": "b"}]},
        {"prompt": "c", "route": ["x", None, "y"]},
        {"prompt": "d", "route": [["x", "x"], [None, None]]},  # as a trace is written, a name for each layer
    ]
    file.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    assert read(file=file) == [
        Prompt("a", "x"),
        Prompt([{"role": "user", "content": "b"}]),
        Prompt("c", None, ("x", None, "y")),
        Prompt("d", None, ("x", None)),
    ]


def test_one_adapter_is_everybodys_and_base_is_none():
    assert [p.adapter for p in read(["a", "b"], adapters=["x"])] == ["x", "x"]
    assert [p.adapter for p in read(["a", "b"], adapters=["base", "x"])] == [None, "x"]
    with pytest.raises(UserError, match="adapter: got 2 for 3 prompts, expected one, or one for each"):
        read(["a", "b", "c"], adapters=["x", "y"])


def test_chat_makes_a_prompt_the_users_turn():
    (prompt,) = read(["hi"], chat=True, system="be brief", adapters=["x"])
    assert prompt == Prompt([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}], "x")


BAD = {
    "no json": "{",
    "no prompt": '{"text": "a"}',
    "a list": "[1]",
    "a route of one name": '{"prompt": "a", "route": 3}',
    "a route whose layers differ": '{"prompt": "a", "route": [["x", "y"]]}',
}


@pytest.mark.parametrize("case", BAD)
def test_a_malformed_line_is_named(case, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + BAD[case], "utf-8")
    with pytest.raises(UserError, match="prompts_file: line 2 of .*p.jsonl is .*, expected") as caught:
        read(file=file)
    assert "\n" not in str(caught.value)


def test_only_a_line_feed_ends_a_line(tmp_path):
    text = "one\u2028two\x85three"
    lines, rows = tmp_path / "p.txt", tmp_path / "p.jsonl"
    lines.write_text(f"{text}\nnext\n", "utf-8-sig")
    rows.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n", "utf-8-sig")
    assert [p.text for p in read(file=lines)] == [text, "next"]
    assert [p.text for p in read(file=rows)] == [text]


def test_a_system_message_needs_a_chat():
    with pytest.raises(UserError, match="system: got a message without a chat"):
        read(["hi"], system="be brief")


def test_nothing_to_read_is_one_line(tmp_path):
    with pytest.raises(UserError, match="prompt: got none"):
        read()
    with pytest.raises(UserError, match="prompts_file: cannot read"):
        read(file=tmp_path / "absent.txt")
