"""What delayed batching will yield, and the thresholds that yield the most (TokenRouter, arXiv 2610.12242, §4.3).

N requests never leave; a request that model i has finished with goes to model j with probability p_ij, and c_ij of its
tokens are committed then. On separate devices the models run side by side, and the system is a Markov chain over the
epochs at which a run ends; on one shared device it is a renewal process. Step times are those measured at warm-up.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from molora_jax.config import UserError
from molora_jax.typing import Float

Times = Callable[[float, float], float]
"""Seconds that a run of (rows, tokens to read in all) takes."""


class BucketTime(NamedTuple):
    """What a run of one compiled program takes: `seconds`, and so much more for each row and token that it has to do.

    Attributes:
      rows, tokens: that it has room for.
    """

    rows: int
    tokens: int
    seconds: float
    per_row: float = 0.0
    per_token: float = 0.0

    def of(self, rows: float, tokens: float) -> float:
        """Seconds of a run of so many; inf where they do not fit."""
        fits = rows <= self.rows and tokens <= self.tokens
        return self.seconds + self.per_row * rows + self.per_token * tokens if fits else math.inf


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Measured step times: a staircase, since a run costs what its bucket does, with sloping steps."""

    buckets: tuple[BucketTime, ...]

    def __call__(self, rows: float, tokens: float) -> float:
        """Of one run in the quickest bucket that has room, or of several smaller ones if they are quicker."""
        most = max(bucket.tokens for bucket in self.buckets)
        parts = range(1, max(math.ceil(rows), math.ceil(tokens / most), 1) + 1)
        return min(n * self._one(math.ceil(rows / n), tokens / n) for n in parts)

    def _one(self, rows: int, tokens: float) -> float:
        return min(bucket.of(rows, tokens) for bucket in self.buckets)


def constant(seconds: float) -> Times:
    """A run takes as long whatever it reads, as the paper assumes."""
    return lambda rows, tokens: seconds


@dataclasses.dataclass(frozen=True)
class Routing:
    """How requests move between the models.

    Attributes:
      moves: p_ij: [M, M], rows summing to 1.
      commits: c_ij, tokens committed on the way from i to j: [M, M].
    """

    moves: tuple[tuple[float, ...], ...]
    commits: tuple[tuple[float, ...], ...]

    @classmethod
    def pair(cls, share: float) -> "Routing":
        """A small model whose token is dropped with probability `share`, and a large one that writes one instead."""
        return cls(((1 - share, share), (1.0, 0.0)), ((1.0, 0.0), (1.0, 0.0)))

    @classmethod
    def counted(cls, moves: np.ndarray, commits: np.ndarray) -> "Routing":
        """From how often requests went from i to j, and the tokens committed then; a model never seen stays put."""
        moves, commits = np.asarray(moves, float), np.asarray(commits, float)
        seen = moves.sum(axis=1, keepdims=True) > 0
        shares = np.where(seen, moves, np.eye(len(moves)))
        shares = shares / shares.sum(axis=1, keepdims=True)
        means = commits / np.maximum(moves, 1)
        return cls(*(tuple(map(tuple, table.tolist())) for table in (shares, means)))

    @functools.cached_property
    def writes(self) -> float:
        """Tokens that a request commits at a visit, in the long run from model 0; 0 where it is caught on the way."""
        lazy = (np.eye(len(self.moves)) + np.array(self.moves)) / 2  # so that a periodic chain settles too
        visits = np.linalg.matrix_power(lazy, 1 << 30)[0]
        return float(visits @ (np.array(self.moves) * np.array(self.commits)).sum(axis=1))

    @functools.cached_property
    def suffixes(self) -> tuple[Float[np.ndarray, "n"], ...]:
        """Of each model, the chance that it has to read n = 0, 1, … tokens at a visit.

        They are those committed since its last one, and one at least. Visits are followed until all but 1e-9 of them
        have come to their ends, or `LONGEST` tokens are written.
        """
        return tuple(self._law(model) for model in range(len(self.moves)))

    def _law(self, model: int) -> Float[np.ndarray, "n"]:
        moves = np.array(self.moves)
        steps = np.minimum(np.rint(np.array(self.commits)), LONGEST).astype(int)
        law, away = np.zeros(LONGEST + 1), np.zeros((len(moves), LONGEST + 1))
        away[model, 0] = 1
        for _ in range(2 * LONGEST):
            following = np.zeros_like(away)
            for i, j in np.argwhere(moves > 0):
                following[j] += moves[i, j] * _shifted(away[i], steps[i, j])
            law += following[model]
            following[model] = 0
            away = following
            if away.sum() < 1e-9:
                break
        if law.sum() < 1e-6:  # nobody comes back
            return np.array([0.0, 1.0])
        law[-1] += away.sum()
        law[1] += law[0]
        law[0] = 0
        return _trimmed(law)


LONGEST = 1024
"""Tokens of a suffix, above which it counts as that long."""


def _shifted(chances: Float[np.ndarray, "n"], by: int) -> Float[np.ndarray, "n"]:
    """Chances of numbers that are so much higher (never below 0, nor beyond the last)."""
    at = np.clip(np.arange(chances.size) + by, 0, chances.size - 1)
    return np.bincount(at, chances, chances.size)


def _trimmed(chances: Float[np.ndarray, "n"]) -> Float[np.ndarray, "m"]:
    """Without the highest numbers, which nearly never come."""
    return np.trim_zeros(np.where(chances < 1e-12, 0, chances), "b")


@functools.lru_cache(maxsize=64)
def latencies(routing: Routing, times: tuple[Times, ...], requests: int) -> Float[np.ndarray, "M N+1"]:
    """Expected seconds of a run of each model with b rows, whose suffixes are drawn from its law; 0 for no rows."""
    found = np.zeros((len(times), requests + 1))
    for own, time, law in zip(found, times, routing.suffixes, strict=True):
        total = np.ones(1)  # of no rows: no tokens
        for rows in range(1, requests + 1):
            total = _trimmed(np.convolve(total, law))
            at, weights = _digest(total)
            own[rows] = sum(weight * time(rows, tokens) for tokens, weight in zip(at, weights, strict=True))
    return found


def _digest(chances: Float[np.ndarray, "n"], parts: int = 32) -> tuple[Float[np.ndarray, "k"], Float[np.ndarray, "k"]]:
    """A law as at most `parts` values and their weights: of equally likely stretches, the mean."""
    part = np.minimum((np.cumsum(chances) - chances / 2) / chances.sum() * parts, parts - 1).astype(int)
    weight = np.bincount(part, chances, parts)
    mean = np.bincount(part, chances * np.arange(chances.size), parts)
    kept = weight > 0
    return mean[kept] / weight[kept], weight[kept] / chances.sum()


def separate(
    routing: Routing, times: Sequence[Times], thresholds: Sequence[int], requests: int, *, tick: float | None = None
) -> float:
    """Tokens per second of models on devices of their own (eq. 21, solved exactly on a grid of time).

    Args:
      tick: seconds of a grid step; by default one that is 1 % true to all step times, or an eighth of the shortest.

    Raises:
      UserError: thresholds that `requests` may never reach (eq. 22).
    """
    if sum(b - 1 for b in thresholds) >= requests:
        raise UserError(f"thresholds: got {tuple(thresholds)}, expected Σ (B - 1) below {requests} requests (eq. 22)")
    seconds = latencies(routing, tuple(times), requests)
    tick = tick or _tick(seconds[:, 1:])
    ticks = np.maximum(np.rint(seconds / tick), 1).astype(int).tolist()
    chain = _Chain(routing, ticks, tuple(thresholds))
    return float(chain.solve(requests) / tick)


def _tick(seconds: np.ndarray) -> float:
    for parts in range(1, 9):
        tick = seconds.min() / parts
        if np.abs(np.rint(seconds / tick) * tick / seconds - 1).max() < 0.01:
            break
    return tick


class _Chain:
    """The states that the system can be in when a run ends: per model (waiting, rows running, ticks to go)."""

    def __init__(self, routing: Routing, ticks: list[list[int]], thresholds: tuple[int, ...]):
        self.ticks, self.thresholds, self.models = ticks, thresholds, range(len(ticks))
        self.moves = routing.moves
        expected = np.array(routing.moves) * np.array(routing.commits)
        self.written = expected.sum(axis=1).tolist()  # tokens that a row of each model commits
        self._splits: dict[tuple[int, int], list[tuple[tuple[int, ...], float]]] = {}

    def launch(self, waiting: list[int], running: list[int], left: list[int]) -> tuple:
        for i in self.models:
            if not running[i] and waiting[i] >= self.thresholds[i]:
                running[i], waiting[i] = waiting[i], 0
                left[i] = self.ticks[i][running[i]]
        return (*waiting, *running, *left)

    def splits(self, i: int, rows: int) -> list[tuple[tuple[int, ...], float]]:
        """Where `rows` requests that model i has finished with may go, and how likely (multinomial)."""
        if (i, rows) not in self._splits:
            self._splits[i, rows] = list(_multinomial(rows, self.moves[i]))
        return self._splits[i, rows]

    def following(self, state: tuple) -> tuple[int, float, list[tuple[tuple, float]]]:
        """Ticks until a run ends, tokens committed then, and the states that follow with their probabilities."""
        size = len(self.ticks)
        waiting, running, left = state[:size], state[size : 2 * size], state[2 * size :]
        held = min(left[i] for i in self.models if running[i])
        done = [i for i in self.models if running[i] and left[i] == held]
        tokens = sum(running[i] * self.written[i] for i in done)
        outcomes = []
        for parts in itertools.product(*(self.splits(i, running[i]) for i in done)):
            at, on, to_go, chance = list(waiting), list(running), list(left), 1.0
            for split, probability in parts:
                chance *= probability
                at = [a + b for a, b in zip(at, split, strict=True)]
            for i in self.models:
                to_go[i] = max(to_go[i] - held, 0)
                on[i] = 0 if i in done else on[i]
            outcomes.append((self.launch(at, on, to_go), chance))
        return held, tokens, outcomes

    def solve(self, requests: int) -> float:
        """Tokens per tick in the long run, all requests starting at model 0."""
        none = [0] * len(self.ticks)
        first = self.launch([requests, *none[1:]], none.copy(), none.copy())
        index, todo = {first: 0}, [first]
        held, tokens, source, target, chances = [], [], [], [], []
        for state in todo:
            duration, written, outcomes = self.following(state)
            held.append(duration)
            tokens.append(written)
            for following, chance in outcomes:
                if following not in index:
                    index[following] = len(todo)
                    todo.append(following)
                source.append(len(held) - 1)
                target.append(index[following])
                chances.append(chance)
        share = _stationary(np.array(source), np.array(target), np.array(chances), len(todo))
        return float(share @ np.array(tokens) / (share @ np.array(held)))


def _multinomial(total: int, chances: Sequence[float]):
    """Every way to split `total` by `chances`, with its probability."""
    if len(chances) == 1:
        yield (total,), chances[0] ** total
        return
    rest = sum(chances[1:])
    for first in range(total + 1):
        chance = math.comb(total, first) * chances[0] ** first
        if chance == 0 or (rest == 0 and first < total):
            continue
        for split, probability in _multinomial(total - first, chances[1:]):
            if probability:
                yield (first, *split), chance * probability


def _stationary(source: np.ndarray, target: np.ndarray, chances: np.ndarray, states: int) -> np.ndarray:
    """π = π P of a chain with one recurrent class: [states]."""
    if states <= 600:
        matrix = np.zeros((states, states))
        np.add.at(matrix, (target, source), chances)
        balance = matrix - np.eye(states)
        balance[-1] = 1
        return np.linalg.solve(balance, np.append(np.zeros(states - 1), 1))
    share = np.full(states, 1 / states)
    for _ in range(5000):
        moved = np.bincount(target, share[source] * chances, states)
        following = (share + moved) / 2  # half a step, so that a periodic chain settles too
        if np.abs(following - share).sum() < 1e-9:
            return following
        share = following
    return share


def shared(share: float, times: Sequence[Times], threshold: int, requests: int) -> float:
    """Tokens per second of a small and a large model on one device, `share` of the small one's tokens rewritten.

    The small model runs until `threshold` requests wait for the large one, which then runs once for all of them: exact,
    by the expected time and tokens from each number of waiting requests to that run's end.
    """
    if not 1 <= threshold <= requests:
        raise UserError(f"threshold: got {threshold}, expected 1 to {requests} requests")
    small, large = latencies(Routing.pair(share), tuple(times), requests)
    if share == 0:
        return requests / float(small[requests])
    seconds, tokens = np.append(np.zeros(threshold), large[threshold:]), np.arange(requests + 1.0)
    for waiting in range(threshold - 1, -1, -1):
        active = requests - waiting
        routed = np.array([math.comb(active, j) * share**j * (1 - share) ** (active - j) for j in range(active + 1)])
        moves = routed[1:] / (1 - routed[0])
        runs = 1 / (1 - routed[0])  # until somebody is routed
        seconds[waiting] = runs * small[active] + moves @ seconds[waiting + 1 :]
        kept = active * (1 - share) * runs
        tokens[waiting] = kept + moves @ tokens[waiting + 1 :]
    return float(tokens[0] / seconds[0])


def fluid_share(share: float, ratio: float) -> float:
    """B*/N on one shared device for many requests: 1 - (1 - p)^s, s the small model's runs per large one's.

    s maximises (1 - (1 - p)^s)/(s L0 + L1), that is, e^{qs} = 1 + q (s + L1/L0) with q = -ln(1 - p).
    """
    if not 0 < share < 1:
        raise UserError(f"share: got {share}, expected above 0 and below 1")
    q = -math.log1p(-share)
    low, high = 0.0, 1.0
    excess = lambda s: math.expm1(q * s) - q * (s + ratio)
    while excess(high) < 0:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return 1 - (1 - share) ** low


def best_shared(
    share: float, times: Sequence[Times], requests: int, edges: Sequence[int] | None = None
) -> tuple[int, float]:
    """The threshold of the large model with the highest throughput on one device, and that throughput.

    Args:
      edges: thresholds to choose from (the buckets of rows); by default all.
    """
    options = [b for b in edges or range(1, requests + 1) if b <= requests]
    return max(((b, shared(share, times, b, requests)) for b in options), key=lambda option: option[1])


def best_separate(
    routing: Routing, times: Sequence[Times], requests: int, edges: Sequence[int] | None = None
) -> tuple[tuple[int, ...], float]:
    """The thresholds with the highest throughput on separate devices (eq. 22 holds), and that throughput.

    Climbs along one model's threshold at a time, the slowest first, from no delay on; throughput has one top in each.
    """
    options = [b for b in edges or range(1, requests + 1) if b <= requests]
    value = functools.cache(lambda thresholds: separate(routing, times, thresholds, requests))
    best, before = (1,) * len(times), None
    while best != before:
        before = best
        for i in reversed(range(len(times))):
            best = _climb(value, best, i, options, requests)
    return best, value(best)


def _climb(value: Callable, best: tuple[int, ...], i: int, options: Sequence[int], requests: int) -> tuple[int, ...]:
    """Moves threshold i along `options` for as long as the throughput rises."""
    at = max(n for n, option in enumerate(options) if option <= best[i])
    for step in (1, -1):
        while 0 <= at + step < len(options):
            trial = (*best[:i], options[at + step], *best[i + 1 :])
            if sum(b - 1 for b in trial) >= requests or value(trial) <= value(best):
                break
            best, at = trial, at + step
    return best
