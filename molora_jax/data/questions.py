"""Examples by the name that a user gives: a kind of testbed problem, or a benchmark."""

import dataclasses
import random
from pathlib import Path

from molora_jax.config import UserError
from molora_jax.data.document import Source
from molora_jax.data.example import Example
from molora_jax.data.rows import Report
from molora_jax.data.tasks import registry
from molora_jax.data.testbed import recipe
from molora_jax.data.testbed.domains import DOMAINS
from molora_jax.data.testbed.recipe import INTERLEAVED, KINDS, SEVERAL, Recipe, Stream
from molora_jax.data.turns import JOIN, turns

TESTBED = "testbed:"
"""Before the name of a kind of testbed problem."""
BARE = "bare"
"""The kind `several` without the domains' markers."""
DRAWN = 1 << 20
"""Testbed examples of a split; no run gets to their end."""
REPORTED = "reported"
"""The split that results are told of: the test split, or the validation split where the test's answers are secret."""


def source(
    name: str,
    split: str,
    *,
    seed: int = 0,
    data_dir: Path | str | None = None,
    strict: bool = False,
    report: Report | None = None,
    **changes,
) -> Source[Example]:
    """All examples of a split.

    Args:
      name: "testbed:calc" and so on, under the house rule; "testbed:several", "testbed:bare" (without the domains'
        markers), "testbed:interleaved", "testbed:facts"; a benchmark of `tasks.registry`; or two of them, as
        "gsm8k+boolq": a question of the second after a worked one of the first.
      split: of the data set, or `REPORTED`.
      seed: of testbed problems.
      data_dir, strict, report: of benchmarks, as `Task.load` takes them.
      changes: fields of the testbed's `Recipe` that differ from the kind's own.

    Raises:
      UserError: no such name, or what `Task.load` raises.
    """
    if name.startswith(TESTBED):
        own = dataclasses.replace(_recipe(name.removeprefix(TESTBED)), **changes)
        return Stream(own, "test" if split == REPORTED else split, seed, DRAWN)
    how = dict(data_dir=data_dir, strict=strict, report=report)
    if name.count(JOIN) == 1:
        return turns(*(_benchmark(part, split, **how) for part in name.split(JOIN)))
    return _benchmark(name, split, **how)


def _benchmark(name: str, split: str, **how) -> list[Example]:
    if name not in registry.TASKS:
        kinds = ", ".join(TESTBED + kind for kind in (*KINDS, BARE))
        raise UserError(f"data: got {name!r}, expected one of {', '.join(registry.TASKS)}, two as a{JOIN}b, {kinds}")
    task = registry.task(name)
    own = next(each for each in ("test", "validation") if each in task.files) if split == REPORTED else split
    return task.load(own, **how)


def questions(name: str, split: str, count: int, *, seed: int = 0, **how) -> list[Example]:
    """At most `count` of them: of a benchmark a random choice, in its order; `how` is for `source`."""
    found = source(name, split, seed=seed, **how)
    if name.startswith(TESTBED):
        return [found[i] for i in range(count)]
    chosen = random.Random(seed).sample(range(len(found)), min(count, len(found)))
    return [found[i] for i in sorted(chosen)]


def _recipe(kind: str) -> Recipe:
    if kind in (SEVERAL, BARE, INTERLEAVED):
        shares = {SEVERAL if kind == BARE else kind: 1.0}
        return dataclasses.replace(recipe.MIXED, shares=shares, bare=float(kind == BARE))
    if kind in DOMAINS:
        return recipe.specialist(kind)
    if kind in KINDS:
        return Recipe(shares={kind: 1.0})
    raise UserError(f"testbed: got {kind!r}, expected one of {', '.join((*KINDS, BARE))}")
