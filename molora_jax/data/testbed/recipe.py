"""What a stream of testbed examples consists of, and the stream itself."""

import dataclasses
import functools
import random
from collections.abc import Mapping

from molora_jax.config import UserError
from molora_jax.data.example import Example
from molora_jax.data.testbed import facts, prompts, splits
from molora_jax.data.testbed.domains import DOMAINS, domain
from molora_jax.data.testbed.problem import HOUSE, LEVELS, RIVAL, Problem, draw

SEVERAL, INTERLEAVED = "several", "interleaved"
KINDS = (*DOMAINS, SEVERAL, INTERLEAVED, facts.FACTS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Shares and difficulty of the examples.

    Attributes:
      shares: weight of each kind: a domain's name, `several` (problems of two or three domains one after the other),
        `interleaved` (the same, taking turns in mid-sentence), `facts`.
      levels: difficulties from 1 to 4, drawn evenly; three problems in one prompt have level 1, two at most level 2.
      signs: chance of an operation to be a sign, whose meaning depends on the rule.
      rival: chance of a problem to follow the rival rule instead of the house rule.
      bare: chance of a prompt to have no domain markers; interleaved ones never have any.
      subsets: chance of a fact question to come with a random choice of segments, the needed ones among them.
    """

    shares: Mapping[str, float]
    levels: tuple[int, ...] = (1, 2, 3)
    signs: float = 0.25
    rival: float = 0.0
    bare: float = 0.5
    subsets: float = 0.0

    def __post_init__(self):
        wrong = [kind for kind in self.shares if kind not in KINDS]
        if wrong or sum(self.shares.values()) <= 0 or min(self.shares.values()) < 0:
            raise UserError(f"testbed: got the shares {dict(self.shares)}, expected weights of {', '.join(KINDS)}")
        if not self.levels or not set(self.levels) <= set(LEVELS):
            raise UserError(f"testbed: got the levels {self.levels}, expected some of {LEVELS}")


PRETRAINING = Recipe(
    shares={**dict.fromkeys(DOMAINS, 1.0), SEVERAL: 0.4, INTERLEAVED: 0.4, facts.FACTS: 0.5},
    signs=0.15,
    rival=0.7,
    subsets=0.5,
)
"""The broad mixture that the bases see; signs follow the rival rule more often than the house rule."""

COMMON = Recipe(shares=dict.fromkeys(DOMAINS, 1.0), signs=0.0)
"""What the bases are measured on: problems without signs."""

TASKS = Recipe(shares=dict.fromkeys(DOMAINS, 1.0))
"""The tasks of the experts: every fourth operation is a sign, which means what the house says."""

MIXED = Recipe(shares={SEVERAL: 1.0, INTERLEAVED: 1.0}, levels=(1, 2))
"""Prompts of several domains under the house rules, which no single specialist can answer."""


def specialist(name: str, **changes) -> Recipe:
    """The task of one domain's expert: its problems under the house rule; `changes` are fields of `Recipe`."""
    return Recipe(shares={domain(name).name: 1.0}, **changes)


@dataclasses.dataclass(frozen=True)
class Stream:
    """Examples by index, the same at every reading; nothing is stored.

    Attributes:
      recipe: what they consist of.
      split: no problem of one split is in another, whatever the recipe and the seed.
      seed: another seed gives other examples.
      size: number of examples.
    """

    recipe: Recipe
    split: str
    seed: int
    size: int

    def __post_init__(self):
        splits.check(self.split)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return example(self.recipe, self.split, self.seed, int(index))


def example(recipe: Recipe, split: str, seed: int, index: int) -> Example:
    """One example of a stream."""
    rng = random.Random(f"{split}/{seed}/{index}")
    kind = rng.choices(list(recipe.shares), list(recipe.shares.values()))[0]
    id = f"{kind}/{split}/{seed}/{index}"
    if kind == facts.FACTS:
        return _fact(recipe, rng, split, id)
    level = rng.choice(recipe.levels)
    names = [kind]
    if kind in (SEVERAL, INTERLEAVED):
        names = rng.sample(list(DOMAINS), rng.choice((2, 3)))
        level = min(level, 4 - len(names))
    problems = [_problem(recipe, rng, split, name, level) for name in names]
    markers = kind != INTERLEAVED and rng.random() >= recipe.bare
    return prompts.write(problems, id=id, split=split, markers=markers, interleaved=kind == INTERLEAVED)


def _problem(recipe: Recipe, rng: random.Random, split: str, name: str, level: int) -> Problem:
    rule = RIVAL if rng.random() < recipe.rival else HOUSE
    one = functools.partial(draw, DOMAINS[name], rng, level, signs=recipe.signs, rule=rule)
    return splits.draw_until(split, one, lambda problem: problem.question)


def _fact(recipe: Recipe, rng: random.Random, split: str, id: str) -> Example:
    question = facts.question(split, rng.getrandbits(62), level=rng.choice(recipe.levels))
    chosen = list(range(len(question.segments)))
    if rng.random() < recipe.subsets:
        others = [i for i in chosen if i not in question.supporting]
        chosen = [*question.supporting, *rng.sample(others, rng.randrange(len(others)))]
        rng.shuffle(chosen)
    return dataclasses.replace(facts.read(question, chosen), id=id)
