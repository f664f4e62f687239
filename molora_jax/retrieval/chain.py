"""Chains of evidence: what is picked first says where to look next.

Either every pass encodes the candidates anew behind the anchors picked so far, as published (`search`), or they are
encoded once and the anchors enter the mixer (`embedded`). P is the number of passes, each of which picks one segment.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.config import UserError
from molora_jax.retrieval import mara
from molora_jax.retrieval.mara import MaraConfig, Scores
from molora_jax.typing import Array, Bool, Float, Int, Params

Scorer = Callable[[Sequence[tuple[int, ...]], np.ndarray], np.ndarray]
"""(anchors of n hypotheses, candidates still in the race [n G]) -> logits [n G], of those out of it anything."""


@dataclasses.dataclass(frozen=True)
class Chain:
    """What a chain found.

    Attributes:
      ranking: all candidates, best first: the picks in their order, the rest by the last pass, then those dropped on
        the way, the latest first.
      picks: how many of them were picked.
      scores: [G] logits in the candidates' own order: of the pass that picked or dropped a candidate, else the last.
    """

    ranking: tuple[int, ...]
    picks: int
    scores: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Hypothesis:
    total: float
    anchors: tuple[int, ...]
    dropped: tuple[int, ...]  # the latest first
    scores: np.ndarray

    def racing(self) -> np.ndarray:
        racing = np.ones(len(self.scores), bool)
        racing[list(self.dropped)] = False
        return racing

    def open(self) -> np.ndarray:
        """What can still be picked, in the candidates' order."""
        racing = self.racing()
        racing[list(self.anchors)] = False
        return np.flatnonzero(racing)


def search(score: Scorer, count: int, *, passes: int = 4, beams: int = 1, drop: int = 0) -> Chain:
    """Picks one of `count` candidates a pass, by the scores behind those picked before (Dokme & Heck 2026).

    With `beams` the sequence of picks is sought that has the largest Σ log σ(logit at its pass); 1 is the published
    chain. With `drop` every pass but the last also takes the so many lowest of the others out of the race (cascade).
    Of equal scores the earlier candidate is the better.

    Raises:
      UserError: no candidate, pass or beam, or scores that are NaN or of another shape.
    """
    if min(count, passes, beams) < 1 or drop < 0:
        got = f"{count} candidates, {passes} passes, {beams} beams, drop {drop}"
        raise UserError(f"chain: got {got}, expected at least 1, 1, 1 and 0")
    front = [_Hypothesis(0.0, (), (), np.zeros(count))]
    for step in range(min(passes, count)):
        if not len(front[0].open()):  # the hypotheses pick and drop in step: none has any left
            break
        racing = np.stack([h.racing() for h in front])
        logits = np.asarray(score([h.anchors for h in front], racing), np.float64)
        if logits.shape != racing.shape or np.isnan(logits[racing]).any():
            raise UserError(f"chain: got scores {list(logits.shape)} or NaN, expected numbers {list(racing.shape)}")
        last = step == min(passes, count) - 1
        grown = [child for h, x in zip(front, logits, strict=True) for child in _grow(h, x, 0 if last else drop)]
        front = sorted(grown, key=lambda h: -h.total)[:beams]
    best = front[0]
    rest = [int(i) for i in best.open()[_descending(best.scores[best.open()])]]
    return Chain((*best.anchors, *rest, *best.dropped), len(best.anchors), best.scores)


def _grow(h: _Hypothesis, logits: np.ndarray, drop: int) -> list[_Hypothesis]:
    """The hypothesis with each candidate that it could pick next, best first."""
    scores = h.scores.copy()
    scores[h.open()] = logits[h.open()]
    order = h.open()[_descending(scores[h.open()])]
    children = []
    for pick in order:
        others = [int(i) for i in order if i != pick]
        lost = others[max(len(others) - drop, 0) :]
        total = h.total - np.logaddexp(0, -scores[pick])
        children.append(_Hypothesis(total, (*h.anchors, int(pick)), (*lost, *h.dropped), scores))
    return children


def _descending(scores: np.ndarray) -> np.ndarray:
    return np.argsort(-scores, kind="stable")


def embedded(
    cfg: MaraConfig,
    params: Params,
    segments: Float[Array, "B G D"],
    valid: Bool[Array, "B G"],
    *,
    passes: int,
    channels: Float[Array, "B G F"] | None = None,
    links: Float[Array, "B G G C"] | None = None,
) -> tuple[Scores, Int[Array, "B P"]]:
    """A chain over segments that are encoded once: an anchor changes the mixer's state, not the encoding; pure.

    Returns the scores of all passes, leaves [P B G], and the picks, -1 where no candidate was left. Gradients flow
    through the scores, not through the picks.

    Raises:
      UserError: the router has no mark for anchors.
    """

    def step(anchors, k):
        scores = mara.score(cfg, params, segments, valid, anchors[:, :-1], channels=channels, links=links)
        taken = jnp.any(anchors[:, :, None] == jnp.arange(segments.shape[1]), axis=1)
        left = jnp.where(taken, -jnp.inf, scores.local)
        pick = jnp.where(jnp.max(left, axis=1) > -jnp.inf, jnp.argmax(left, axis=1), -1)
        return anchors.at[:, k].set(pick.astype(anchors.dtype)), scores

    anchors, scores = jax.lax.scan(step, jnp.full((len(segments), passes), -1, jnp.int32), jnp.arange(passes))
    return scores, anchors


def finish(local: Float[Array, "P B G"], picks: Int[Array, "B P"], valid: Bool[Array, "B G"]) -> list[Chain]:
    """The chains of a batch that `embedded` made; pads are in no ranking and score -inf."""
    local, picks, valid = np.asarray(local, np.float64), np.asarray(picks), np.asarray(valid)
    chains = []
    for row in range(len(picks)):
        scores, chosen = local[-1, row].copy(), [int(a) for a in picks[row] if a >= 0]
        for k, a in enumerate(chosen):
            scores[a] = local[k, row, a]
        rest = [int(i) for i in _descending(local[-1, row]) if valid[row, i] and i not in chosen]
        chains.append(Chain((*chosen, *rest), len(chosen), scores))
    return chains


def take(ranking: Sequence[int], k: int, order: Literal["rank", "reading"] = "rank") -> tuple[int, ...]:
    """The first k, best first, or in the order in which they stand in the document."""
    if order not in ("rank", "reading"):
        raise UserError(f"chain: got order {order!r}, expected rank or reading")
    return tuple(ranking[:k]) if order == "rank" else tuple(sorted(ranking[:k]))
