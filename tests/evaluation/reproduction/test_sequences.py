"""Prompts of as many domains as the bases know."""

import types

from molora_jax.data.document import from_example
from molora_jax.data.example import Example
from molora_jax.data.testbed import vocabulary
from molora_jax.data.testbed.splits import split_of
from molora_jax.evaluation import systems
from molora_jax.evaluation.reproduction import sequences


def test_a_prompt_has_as_many_domains_and_fits():
    found = sequences.several(60)
    tokenizer = vocabulary.tokenizer()
    assert len({example.prompt for example in found}) == 60
    for example in found:
        domains = example.task.split("+")
        assert len(set(domains)) == len(domains) == sequences.K
        assert len(from_example(tokenizer, example)) <= 128
        parts = example.prompt.strip().split(" |")
        assert all(split_of(part.split(":", 1)[1]) == "test" for part in parts)
    assert [e.prompt for e in sequences.several(3)] == [e.prompt for e in found[:3]]


def test_of_each_pass_its_own_domains_part_counts(monkeypatch):
    """Experts that know their own domain alone; one of them stops short in the last prompt."""
    asked = [
        Example(id="0", task="calc+text", split="test", prompt="", completion="", answer="85 | m f"),
        Example(id="1", task="text", split="test", prompt="", completion="", answer="m f"),
        Example(id="2", task="text+calc", split="test", prompt="", completion="", answer="m f | 85"),
        Example(id="3", task="calc+text", split="test", prompt="", completion="", answer="85 | m f"),
    ]
    said = {
        "calc": ["47+38=85 ->85 | x ->x", "9 ->9", "x ->x | 47+38=85 ->85", "47+38=85 ->85 |"],
        "text": ["1 ->1 | rev: m f -> m f", "rev: m f -> m f", "rev: m f -> m f | 1 ->1", "1 ->1 | rev: m f -> m f"],
    }
    monkeypatch.setattr(systems, "answers", lambda model, system, examples: said[system.single])
    experts = [types.SimpleNamespace(name=name) for name in said]
    assert sequences.own_parts(None, experts, asked).tolist() == [True, True, True, False]
