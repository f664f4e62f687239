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

    @property
    def points(self) -> str:
        """In percentage points, with its interval."""
        return f"{100 * self.mean:+.1f} ({100 * self.low:+.1f} to {100 * self.high:+.1f})"


def paired(
    ours: Float[Array, "*seeds n"],
    theirs: Float[Array, "*seeds n"],
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Difference:
    """Resamples questions, not systems, so that what makes a question hard cancels (Efron & Tibshirani 1993, §13.3).

    With several seeds of both systems on the same questions, seeds are resampled too: a seed's pair of systems stays
    together, and the interval is that of another few seeds on other questions. It is the percentile one.

    Raises:
      UserError: arrays of different or no length, numbers that are not finite, or a level outside (0, 1).
    """
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if ours.shape != theirs.shape or ours.ndim not in (1, 2) or not ours.size:
        got = f"{list(ours.shape)} and {list(theirs.shape)}"
        raise UserError(f"bootstrap: got scores of {got}, expected one of each system for every question")
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        raise UserError("bootstrap: got a score that is not finite, expected numbers")
    if not 0 < level < 1 or resamples < 1:
        raise UserError(f"bootstrap: got level {level} and {resamples} resamples, expected (0, 1) and at least 1")
    gaps, rng = np.atleast_2d(ours - theirs), np.random.default_rng(seed)
    step = max(1, _DRAWS // gaps.size)
    sizes = [min(step, resamples - start) for start in range(0, resamples, step)]
    means = np.concatenate([_resampled(gaps, size, rng) for size in sizes])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Difference(float(gaps.mean()), float(low), float(high), float(np.mean(means <= 0)), gaps.shape[1])


def _resampled(gaps: Float[np.ndarray, "seeds n"], size: int, rng: np.random.Generator) -> Float[np.ndarray, "size"]:
    """The mean gap of so many draws of as many questions, and of as many seeds."""
    seeds, n = gaps.shape
    means = gaps[:, rng.integers(n, size=(size, n))].mean(axis=2)
    if seeds == 1:
        return means[0]
    return np.take_along_axis(means.T, rng.integers(seeds, size=(size, seeds)), axis=1).mean(axis=1)
