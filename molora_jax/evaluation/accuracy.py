"""Shares of problems solved, with their intervals."""

import dataclasses
import math

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

    @property
    def values(self) -> dict[str, float]:
        """The same as JSON values."""
        low, high = self.interval
        return dict(right=self.right, n=self.n, share=round(self.share, 4), low=round(low, 4), high=round(high, 4))
