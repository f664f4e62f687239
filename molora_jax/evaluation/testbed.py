"""How many problems of the testbed a model solves, decoded greedily in large batches."""

import dataclasses
from collections.abc import Mapping, Sequence

from molora_jax.checkpoints.model import Model
from molora_jax.data.example import Example
from molora_jax.data.testbed.domains import DOMAINS
from molora_jax.data.testbed.recipe import COMMON, Recipe, Stream
from molora_jax.data.testbed.verifier import JUDGE
from molora_jax.engine.engine import Engine
from molora_jax.engine.experts import Experts
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.evaluation.accuracy import Accuracy

LENGTH = 128
"""Most tokens of a prompt and its solution."""


def solutions(
    model: Model,
    examples: Sequence[Example],
    *,
    rows: int = 64,
    experts: Experts | None = None,
    adapter: str | None = None,
) -> list[str]:
    """What the model writes after each prompt, up to its end-of-text token or `LENGTH` tokens.

    Args:
      rows: examples that run at once.
      adapter: name of the expert of all tokens.
    """
    prompts = [model.tokenizer.encode(example.prompt) for example in examples]
    engine = Engine(model.cfg, model.params, EngineConfig(max_rows=rows, max_length=LENGTH, block=LENGTH), experts)
    how = dict(stops=model.tokenizer.eos, adapter=adapter)
    events = engine.run([Request(prompt=ids, max_new_tokens=LENGTH - len(ids), **how) for ids in prompts])
    return [model.tokenizer.decode(event.tokens) for event in events]


def accuracy(model: Model, examples: Sequence[Example], **how) -> Accuracy:
    """Of the examples, those whose answers are all right; `how` is for `solutions`."""
    written = solutions(model, examples, **how)
    return Accuracy(sum(JUDGE.verify([example.answer for example in examples], written)), len(examples))


def by_domain(
    model: Model, n: int, *, recipe: Recipe = COMMON, split: str = "test", seed: int = 0
) -> dict[str, Accuracy]:
    """The accuracy on `n` problems of each domain, drawn as `recipe` says but for its shares."""
    examples = []
    for name in DOMAINS:
        examples += Stream(dataclasses.replace(recipe, shares={name: 1.0}), split, seed, n)
    written = solutions(model, examples)
    right = JUDGE.verify([example.answer for example in examples], written)
    return {name: Accuracy(sum(right[i * n : (i + 1) * n]), n) for i, name in enumerate(DOMAINS)}


def written(found: Mapping[str, Accuracy]) -> dict[str, dict[str, float]]:
    """The same as JSON values, by domain."""
    return {name: accuracy.values for name, accuracy in found.items()}


def table(found: Mapping[str, Mapping[str, Accuracy]]) -> str:
    """A line a domain, a column a model, in Markdown."""
    rows = [["domain", *found], ["---"] * (1 + len(found))]
    rows += [[name, *(str(column[name]) for column in found.values())] for name in DOMAINS]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
