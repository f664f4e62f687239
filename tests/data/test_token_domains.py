"""Tokens belong to the domain in whose stretch of the text they end."""

import dataclasses

import pytest

from molora_jax.config import UserError
from molora_jax.data.document import from_example
from molora_jax.data.example import Example
from molora_jax.data.testbed.recipe import PRETRAINING, Stream
from molora_jax.data.testbed.vocabulary import tokenizer
from molora_jax.data.token_domains import token_domains


def test_each_domain_owns_its_text():
    text = tokenizer()
    for example in Stream(PRETRAINING, "train", 7, 200):
        domains, tokens = token_domains(text, example), from_example(text, example).tokens
        assert len(domains) == len(tokens)
        assert (domains[0], domains[-1]) == (example.spans[0].domain, example.spans[-1].domain)
        whole = example.prompt + example.completion
        for name in set(domains):
            own = text.decode([t for t, d in zip(tokens, domains, strict=True) if d == name])
            assert own == "".join(whole[s.start : s.stop] for s in example.spans if s.domain == name)


def test_one_domain_without_spans():
    example = Example(id="x", task="calc", prompt="1 +1\n", completion="1+1=2 ->2", answer="2", split="train")
    assert set(token_domains(tokenizer(), example)) == {"calc"}


def test_a_token_across_prompt_and_completion_has_no_place():
    example = Stream(PRETRAINING, "train", 7, 1)[0]
    with pytest.raises(UserError, match="does not end between two tokens"):
        token_domains(tokenizer(), dataclasses.replace(example, prompt=" twi", completion="ce"))
