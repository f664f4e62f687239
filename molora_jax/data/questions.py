"""Examples by the name that a user gives: a kind of testbed problem, or a benchmark."""

import dataclasses
import random
from pathlib import Path

from molora_jax.config import UserError
from molora_jax.data.example import Example
from molora_jax.data.tasks import registry
from molora_jax.data.testbed import recipe
from molora_jax.data.testbed.domains import DOMAINS
from molora_jax.data.testbed.recipe import INTERLEAVED, KINDS, SEVERAL, Stream

PREFIX = "testbed:"
BARE = "bare"
"""The kind `several` without the domains' markers."""


def questions(
    name: str, split: str, count: int, *, seed: int = 0, signs: float = 0.25, data_dir: Path | str | None = None
) -> list[Example]:
    """At most `count` examples of a split.

    Args:
      name: "testbed:calc" and so on, house rules; "testbed:several", "testbed:bare" (without the domains' markers),
        "testbed:interleaved", "testbed:facts"; or a benchmark of `tasks.registry`, of which a random choice is taken.
      signs: chance of a testbed operation to be a sign.
      data_dir: folder of the benchmarks.

    Raises:
      UserError: no such name, or what `Task.load` raises.
    """
    if name.startswith(PREFIX):
        return list(Stream(_recipe(name.removeprefix(PREFIX), signs), split, seed, count))
    if name not in registry.TASKS:
        kinds = ", ".join(PREFIX + kind for kind in (*KINDS, BARE))
        raise UserError(f"data: got {name!r}, expected one of {', '.join(registry.TASKS)}, {kinds}")
    found = registry.task(name).load(split, data_dir=data_dir)
    chosen = random.Random(seed).sample(range(len(found)), min(count, len(found)))
    return [found[i] for i in sorted(chosen)]


def _recipe(kind: str, signs: float) -> recipe.Recipe:
    if kind in DOMAINS:
        return recipe.specialist(kind, signs=signs)
    if kind not in (*KINDS, BARE):
        raise UserError(f"testbed: got {kind!r}, expected one of {', '.join((*KINDS, BARE))}")
    if kind in (SEVERAL, BARE, INTERLEAVED):
        shares = {SEVERAL if kind == BARE else kind: 1.0}
        return dataclasses.replace(recipe.MIXED, shares=shares, signs=signs, bare=float(kind == BARE))
    return recipe.Recipe(shares={kind: 1.0}, signs=signs)
