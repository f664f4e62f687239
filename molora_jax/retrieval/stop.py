"""How many segments to take: as many as it needs for the evidence to be whole in the share of questions asked for."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from molora_jax.config import UserError
from molora_jax.retrieval.chain import Chain


@dataclasses.dataclass(frozen=True)
class Stop:
    """Stops once the evidence expected among the segments not yet taken is small.

    Attributes:
      scale, shift: σ(scale · logit + shift) is the probability that a segment is evidence.
      threshold: largest sum of these over the segments left out; -inf takes every segment.
    """

    scale: float
    shift: float
    threshold: float

    def count(self, chain: Chain) -> int:
        """The smallest k >= 1 whose rest falls to the threshold, else all candidates."""
        enough = np.flatnonzero(_rest(self, chain) <= self.threshold)
        return int(enough[0]) + 1 if len(enough) else len(chain.ranking)


def fit(chains: Sequence[Chain], golds: Sequence[Iterable[int]], *, target: float) -> Stop:
    """A stop that takes all evidence of at least the share `target` of new questions.

    Probabilities by Platt's scaling (Platt 1999); the threshold by split conformal prediction (Vovk et al. 2005, §4.1):
    questions drawn like the n given ones are whole with a probability of at least `target`, over both draws, but for
    what the scaling's two numbers, and the choice of a checkpoint, learn from the same questions. With too few for
    that, ⌈target (n + 1)⌉ > n, every segment is taken. Never fit on the questions that are reported.

    Raises:
      UserError: no chain, another number of golds, a target outside (0, 1), or evidence that a chain does not rank.
    """
    golds = [set(gold) for gold in golds]
    if not chains or len(chains) != len(golds) or not 0 < target < 1:
        got = f"{len(chains)} chains, {len(golds)} sets of evidence and the target {target}"
        raise UserError(f"stop: got {got}, expected as many of both and a target between 0 and 1")
    if any(not gold or gold - set(chain.ranking) for chain, gold in zip(chains, golds, strict=True)):
        raise UserError("stop: got a question without evidence, or evidence that is not ranked; expected both")
    logits = np.concatenate([chain.scores[list(chain.ranking)] for chain in chains])
    labels = np.concatenate([[i in gold for i in chain.ranking] for chain, gold in zip(chains, golds, strict=True)])
    free = Stop(*platt(logits, labels), threshold=-math.inf)
    # a question stays whole while the threshold is below the rest that its last piece of evidence is part of
    limits = []
    for chain, gold in zip(chains, golds, strict=True):
        needed = max(place for place, i in enumerate(chain.ranking) if i in gold)
        limits.append(_rest(free, chain)[needed - 1] if needed else math.inf)
    whole = math.ceil(target * (len(limits) + 1) - 1e-9)
    if whole > len(limits):
        return free
    limit = sorted(limits, reverse=True)[whole - 1]
    return dataclasses.replace(free, threshold=float(np.nextafter(limit, -math.inf)))


def platt(logits: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """(scale, shift) that minimise the cross-entropy of σ(scale · x + shift), by Newton's method.

    The labels are drawn in to (P + 1) / (P + 2) and 1 / (N + 2) with P true and N false ones, so that the optimum is
    finite even where a threshold separates them (Platt 1999, §2.2).
    """
    true = int(np.sum(labels))
    targets = np.where(labels, (true + 1) / (true + 2), 1 / (len(labels) - true + 2))
    features = np.stack([np.asarray(logits, np.float64), np.ones(len(logits))], axis=1)
    loss = lambda w: np.sum(np.logaddexp(0, features @ w) - targets * (features @ w))
    w = np.zeros(2)
    for _ in range(100):
        p = _sigmoid(features @ w)
        slope = features.T @ (p - targets)
        curve = (features * (p * (1 - p))[:, None]).T @ features + 1e-12 * np.eye(2)
        step = np.linalg.solve(curve, slope)
        size = 1.0
        while loss(w - size * step) > loss(w) and size > 1e-10:
            size /= 2
        w = w - size * step
        if np.abs(step).max() < 1e-10:
            break
    return float(w[0]), float(w[1])


def _rest(stop: Stop, chain: Chain) -> np.ndarray:
    """Evidence expected beyond the first 1, 2, …, all of the ranking; falling, and 0 at the end."""
    p = _sigmoid(stop.scale * chain.scores[list(chain.ranking)] + stop.shift)
    return np.append(np.cumsum(p[:0:-1])[::-1], 0.0)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))
