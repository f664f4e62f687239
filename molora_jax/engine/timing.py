"""How long every compiled choice takes, by the rows and tokens that it has to do, measured on the device it runs on."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from molora_jax.engine.fused import NONE, Plan
from molora_jax.engine.table import RequestTable
from molora_jax.typing import Float

LEAST = 1e-6
"""Seconds that every run takes: less is below what can be measured."""


class Load(NamedTuple):
    """What a timed run has to do: `rows` requests, `unread` tokens of each."""

    rows: int
    unread: int


class Times(NamedTuple):
    """What was measured.

    Attributes:
      seconds: of each choice the constant part, and what each row and each token adds.
      look: that a look of the host takes, without a run.
    """

    seconds: Float[np.ndarray, "P 3"]
    look: float


def loads(plan: Plan, choice: int, context: int) -> list[Load]:
    """The corners of what a choice may have to do, and its middle: few and many rows, of few and many tokens each."""
    run, bucket = plan.choices[choice]
    tail = len(plan.fleet.tail(run))
    longest = max(min(bucket.tokens, context + tail), 1 + tail)
    found = set()
    for rows in {1, max(bucket.rows // 2, 1), bucket.rows}:
        most = min(bucket.tokens // rows, longest)
        found |= {Load(rows, max(unread - tail, 1)) for unread in (1 + tail, most)}
    return sorted(found)


def measure(plan: Plan, run: Callable[[int, Load], float], context: int, repeats: int) -> Times:
    """Times all choices, each at several loads, in turn, and fits a plane to the least times of each.

    What a run does is compiled for a full bucket, but rows that are not there read no pages of their own: launches of
    few rows cost less, on a CPU by a tenth or so.

    Args:
      run: runs a choice (`NONE`: nothing) with a load in contexts of `context` tokens; returns the seconds.
    """
    cases = [(choice, load) for choice in range(len(plan.choices)) for load in loads(plan, choice, context)]
    took = dict.fromkeys([(NONE, Load(1, 1)), *cases], np.inf)
    for _ in range(repeats):
        for case in took:
            took[case] = min(took[case], run(*case))
    look = took.pop((NONE, Load(1, 1)))
    seconds = np.zeros((len(plan.choices), 3), np.float32)
    for choice, (own, _) in enumerate(plan.choices):
        tail = len(plan.fleet.tail(own))
        points = [
            (load.rows, load.rows * (load.unread + tail), took[choice, load] - look)
            for load in loads(plan, choice, context)
        ]
        seconds[choice] = plane(points)
    return Times(seconds, look)


def plane(points: list[tuple[int, int, float]]) -> Float[np.ndarray, "3"]:
    """Constant part, and slopes by rows and tokens, none negative, by least squares of (rows, tokens, seconds)."""
    rows, tokens, seconds = np.array(points, float).T
    columns, best, least = np.stack([np.ones_like(rows), rows, tokens], axis=1), None, np.inf
    for kept in ([0], [0, 1], [0, 2], [0, 1, 2]):
        found = np.zeros(3)
        found[kept] = np.linalg.lstsq(columns[:, kept], seconds, rcond=None)[0]
        error = np.sum((columns @ found - seconds) ** 2)
        if np.all(found[1:] >= 0) and error < least:
            best, least = found, error
    return np.array([max(best[0], LEAST), *best[1:]])


def loaded(table: RequestTable, context: int, load: Load, limit: int) -> RequestTable:
    """A table whose first requests, of `context` tokens each, have so much to be read."""
    slots = table.length.shape[0]
    full = lambda leaf, value: np.full(leaf.shape, value, np.int32)
    anchor, active = full(table.anchor, max(context - load.unread, 0)), np.arange(slots) < load.rows
    fields = dict(length=full(table.length, context), anchor=anchor, limit=full(table.limit, limit), active=active)
    return dataclasses.replace(table, **{name: jnp.asarray(value) for name, value in fields.items()})
