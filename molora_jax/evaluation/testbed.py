"""How many problems of the testbed a model solves, decoded greedily in large batches."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from molora_jax.checkpoints.model import Model
from molora_jax.data.example import Example
from molora_jax.data.testbed.domains import DOMAINS
from molora_jax.data.testbed.recipe import COMMON, Recipe, Stream
from molora_jax.data.testbed.verifier import JUDGE
from molora_jax.engine.engine import Engine
from molora_jax.engine.experts import Experts
from molora_jax.engine.request import EngineConfig, Request

LENGTH = 128
"""Most tokens of a prompt and its solution."""
_Z = 1.959964
"""Of a 95 % interval."""


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Problems that were solved.

    Attributes:
      right: how many were.
      n: of how many.
    """

    right: int
    n: int

    @property
    def share(self) -> float:
        return self.right / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true share lies with 95 %, by the score interval (Wilson 1927), which holds near 0 and 1 too."""
        centre, spread = self.share + _Z**2 / (2 * self.n), self.share * (1 - self.share) / self.n
        half = _Z * math.sqrt(spread + _Z**2 / (4 * self.n**2))
        scale = 1 + _Z**2 / self.n
        return (centre - half) / scale, (centre + half) / scale

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.share:.0f} % ({100 * low:.0f}–{100 * high:.0f})"


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
    values = lambda a: dict(right=a.right, n=a.n, share=a.share, low=a.interval[0], high=a.interval[1])
    return {name: {key: round(value, 4) for key, value in values(a).items()} for name, a in found.items()}


def table(found: Mapping[str, Mapping[str, Accuracy]]) -> str:
    """A line a domain, a column a model, in Markdown."""
    rows = [["domain", *found], ["---"] * (1 + len(found))]
    rows += [[name, *(str(column[name]) for column in found.values())] for name in DOMAINS]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
