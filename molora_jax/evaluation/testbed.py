"""How many problems of the testbed a model solves, decoded greedily in large batches."""

import dataclasses
from collections.abc import Mapping

from molora_jax import benchmarking
from molora_jax.checkpoints.model import Model
from molora_jax.data.testbed.domains import DOMAINS
from molora_jax.data.testbed.recipe import COMMON, Recipe, Stream
from molora_jax.data.testbed.verifier import JUDGE
from molora_jax.evaluation import systems
from molora_jax.evaluation.accuracy import Accuracy


def by_domain(
    model: Model, n: int, *, recipe: Recipe = COMMON, split: str = "test", seed: int = 0
) -> dict[str, Accuracy]:
    """The accuracy on `n` problems of each domain, drawn as `recipe` says but for its shares."""
    examples = []
    for name in DOMAINS:
        examples += Stream(dataclasses.replace(recipe, shares={name: 1.0}), split, seed, n)
    written = systems.answers(model, systems.BASE, examples)
    right = JUDGE.verify([example.answer for example in examples], written)
    return {name: Accuracy(sum(right[i * n : (i + 1) * n]), n) for i, name in enumerate(DOMAINS)}


def written(found: Mapping[str, Accuracy]) -> dict[str, dict[str, float]]:
    """The same as JSON values, by domain."""
    return {name: accuracy.values for name, accuracy in found.items()}


def table(found: Mapping[str, Mapping[str, Accuracy]]) -> str:
    """A line a domain, a column a model, in Markdown."""
    rows = [["domain", *found]]
    rows += [[name, *(str(column[name]) for column in found.values())] for name in DOMAINS]
    return benchmarking.markdown(rows)
