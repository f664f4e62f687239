"""A chain of visible steps, the one form that the problems of all testbed domains have.

A problem is a start, some operations on it, and the value after each. Its worked solution shows every value, and the
last one is the answer. Because all domains share this form, problems of several domains can be put into one prompt and
interleaved operation by operation (`mixed.py`).

The signs `@`, `#` and `~` are operations in every domain, with other meanings in each, and in each domain they have two
meanings: the house rule, which the tasks go by, and a rival rule. The bases see both (the rival more often), so that
they know either but follow the rival; a specialist learns to follow its house.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

HOUSE, RIVAL = "house", "rival"
RULES = (HOUSE, RIVAL)

Apply = Callable[[Any, Any], Any]
"""(value, operand) to the value after the operation; the operand is None for an operation without one."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """One thing that can be done to a value.

    Attributes:
      name: how it is written, without its operand.
      apply: what it does.
      operand: draws the operand at a difficulty level, given the value; None for an operation without one.
      level: the lowest difficulty at which it occurs.
      fits: whether it may be done to a value, so that values keep a sensible length.
    """

    name: str
    apply: Apply
    operand: Callable[[random.Random, int, Any], Any] | None = None
    level: int = 1
    fits: Callable[[Any], bool] = lambda value: True


@dataclasses.dataclass(frozen=True)
class Sign:
    """An operation whose meaning depends on the rule."""

    house: Operation
    rival: Operation

    def under(self, rule: str) -> Operation:
        return self.house if rule == HOUSE else self.rival


@dataclasses.dataclass(frozen=True)
class Domain:
    """How the problems of one domain are drawn and written.

    Attributes:
      name: key and marker at the beginning of a prompt.
      start: draws the first value at a difficulty level.
      operations: the same for everybody.
      signs: depend on the rule.
      show: writes a value; what is not arithmetic begins with a space, so that each part is one token.
      ask: writes an operation and its operand in the prompt.
      work: writes a step: operation, operand, value before, value after.
    """

    name: str
    start: Callable[[random.Random, int], Any]
    operations: tuple[Operation, ...]
    signs: tuple[Sign, ...]
    show: Callable[[Any], str]
    ask: Callable[[str, Any], str]
    work: Callable[[str, Any, Any, Any], str]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A drawn problem, written but not yet put into a prompt.

    Attributes:
      domain: name of its domain.
      level: difficulty that it was drawn at.
      start: its first value.
      asked: its operations as the prompt writes them.
      worked: the same as the solution writes them, each with the value after it.
      answer: the last value.
      rule: by which the signs were read.
    """

    domain: str
    level: int
    start: str
    asked: tuple[str, ...]
    worked: tuple[str, ...]
    answer: str
    rule: str

    @property
    def question(self) -> str:
        """Start and operations without a marker: the canonical form, by which a problem falls into its split."""
        return self.start + "".join(self.asked)


LEVELS = (1, 2, 3, 4)
"""Difficulties; every example of them fits in 128 tokens."""


def steps_of(level: int) -> int:
    """Operations of a problem: one more than its level."""
    return level + 1


def draw(
    domain: Domain,
    rng: random.Random,
    level: int,
    *,
    signs: float = 0.0,
    rule: str = HOUSE,
    steps: int | None = None,
) -> Problem:
    """A problem of the given difficulty.

    Args:
      signs: chance of each operation to be a sign.
      rule: meaning of the signs.
      steps: number of operations, `steps_of(level)` when None.
    """
    value = domain.start(rng, level)
    start, asked, worked = domain.show(value), [], []
    for _ in range(steps_of(level) if steps is None else steps):
        operation = _operation(domain, rng, level, value, signs, rule)
        operand = operation.operand(rng, level, value) if operation.operand else None
        after = operation.apply(value, operand)
        asked.append(domain.ask(operation.name, operand))
        worked.append(domain.work(operation.name, operand, value, after))
        value = after
    return Problem(domain.name, level, start, tuple(asked), tuple(worked), domain.show(value), rule)


def _operation(domain: Domain, rng: random.Random, level: int, value: Any, signs: float, rule: str) -> Operation:
    """A sign fits only if it does under either rule: which signs a prompt has must not tell the rule."""
    if rng.random() < signs:
        fitting = [s for s in domain.signs if s.house.fits(value) and s.rival.fits(value)]
        if fitting:
            return rng.choice(fitting).under(rule)
    return rng.choice([o for o in domain.operations if o.level <= level and o.fits(value)])


def listed(name: str, operand: Any) -> str:
    """An operation in a prompt that lists them with commas; operands write their own leading space."""
    return f", {name}{'' if operand is None else operand}"
