"""The threshold that gives a wanted share of tokens to the large model, from scores recorded on real requests."""

from typing import NamedTuple

import numpy as np

from molora_jax.config import UserError


class Calibration(NamedTuple):
    """A threshold, and the share of all tokens that the large model writes at it on the recorded scores."""

    threshold: float
    share: float


def calibrate(
    scores: np.ndarray, share: float, *, below: bool = False, budget: float = 1, dropped: bool = True
) -> Calibration:
    """The threshold whose share is nearest to the one wanted (of two as near, the smaller share).

    A token is routed when its score is at or above the threshold, or, with `below`, under it. Between two distinct
    scores the threshold is half way, so that rounding on another backend decides nothing; tokens that tie go together.

    Args:
      scores: one for each token that the small model wrote, kept or not: [N].
      share: of the large model's among all tokens, 0 to 1.
      below: whether low scores are routed (CITER, max-prob and margin deferral).
      budget: tokens that the large model writes for each routed one (its mean).
      dropped: whether the routed token is taken back.

    Raises:
      UserError: no scores, one that is not finite, or a share out of range.
    """
    flat = np.asarray(scores, np.float32).reshape(-1)
    if not flat.size or not np.isfinite(flat).all():
        raise UserError(f"scores: got {flat.size}, not all finite or none, expected one finite score a token")
    if not 0 <= share <= 1:
        raise UserError(f"share: got {share}, expected 0 to 1")
    distinct, counts = np.unique(-flat if below else flat, return_counts=True)
    # candidate j routes the distinct scores from j on; the last one routes none
    routed = np.append(np.cumsum(counts[::-1])[::-1], 0) / flat.size
    shares = routed * budget / (1 - routed * dropped + routed * budget)
    best = np.flatnonzero(np.abs(shares - share) == np.abs(shares - share).min())[-1]
    return Calibration(_boundary(distinct, int(best), below), float(shares[best]))


def _boundary(distinct: np.ndarray, first: int, below: bool) -> float:
    """A threshold that parts the ascending scores before `first` from the others; `below` negated them."""
    if first == 0:
        edge = np.nextafter(distinct[0], np.float32(-np.inf))
    elif first == distinct.size:
        edge = np.nextafter(distinct[-1], np.float32(np.inf))
    else:
        low, high = distinct[first - 1], distinct[first]
        edge = low + (high - low) / 2
        edge = edge if low < edge <= high else high
    if below:
        # under the threshold is strict: of the score itself, the next number up
        edge = -edge if edge not in distinct else np.nextafter(-edge, np.float32(np.inf))
    return float(np.float32(edge))
