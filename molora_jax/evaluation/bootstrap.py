"""Whether one system is better than another on the same questions: the paired bootstrap."""

import dataclasses

import numpy as np

from molora_jax.config import UserError
from molora_jax.typing import Array, Float

_DRAWS = 1 << 22
"""Indices drawn at a time: 32 MB."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Mean of ours - theirs over n questions, and the interval that covers it at the level asked for.

    Attributes:
      share: of the resamples in which ours is not better; a one-sided p-value in the bootstrap's sense.
    """

    mean: float
    low: float
    high: float
    share: float
    n: int


def paired(
    ours: Float[Array, "n"], theirs: Float[Array, "n"], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Difference:
    """Resamples questions, not systems, so that what makes a question hard cancels (Efron & Tibshirani 1993, §13.3).

    The interval is the percentile one. For several seeds of a system, give the means over seeds of each question.

    Raises:
      UserError: arrays of different or no length, numbers that are not finite, or a level outside (0, 1).
    """
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if ours.shape != theirs.shape or ours.ndim != 1 or not len(ours):
        got = f"{list(ours.shape)} and {list(theirs.shape)}"
        raise UserError(f"bootstrap: got scores of {got}, expected one of each system for every question")
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        raise UserError("bootstrap: got a score that is not finite, expected numbers")
    if not 0 < level < 1 or resamples < 1:
        raise UserError(f"bootstrap: got level {level} and {resamples} resamples, expected (0, 1) and at least 1")
    gaps, rng = ours - theirs, np.random.default_rng(seed)
    step = max(1, _DRAWS // len(gaps))
    sizes = [min(step, resamples - start) for start in range(0, resamples, step)]
    means = np.concatenate([gaps[rng.integers(len(gaps), size=(size, len(gaps)))].mean(axis=1) for size in sizes])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Difference(float(gaps.mean()), float(low), float(high), float(np.mean(means <= 0)), len(gaps))
