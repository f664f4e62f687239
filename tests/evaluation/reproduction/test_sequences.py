"""Prompts of as many domains as the bases know."""

from molora_jax.data.document import from_example
from molora_jax.data.testbed import vocabulary
from molora_jax.data.testbed.splits import split_of
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
