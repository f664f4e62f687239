"""The thresholds that measured step times and the routing seen so far call for."""

from collections.abc import Sequence

import numpy as np

from molora_jax.engine import throughput
from molora_jax.engine.fused import Counts, Plan
from molora_jax.engine.simulate import Schedule, random_trace, simulate
from molora_jax.engine.throughput import BucketTime, Routing, StepTimes
from molora_jax.typing import Float

TOKENS = 2000
"""Committed on the virtual clock to judge thresholds that no closed form covers."""
LEAST = 1e-3
"""Tokens a visit, below which a clock would not come to its end."""


def step_times(plan: Plan, seconds: Float[np.ndarray, "P 3"], look: float = 0.0) -> tuple[StepTimes, ...]:
    """Of each run, from those of each choice; `look` seconds more where the host looks after every run."""
    measured = zip(plan.choices, np.asarray(seconds, float) + [look, 0, 0], strict=True)
    rows = [(run, BucketTime(bucket.rows, bucket.tokens, *each.tolist())) for (run, bucket), each in measured]
    return tuple(StepTimes(tuple(bucket for own, bucket in rows if own == run)) for run in plan.runs)


def routing(counts: Counts) -> Routing:
    """How requests have moved, ends apart."""
    return Routing.counted(np.asarray(counts.moves)[:, :-1], np.asarray(counts.commits)[:, :-1])


def is_pair(routing: Routing) -> bool:
    """Whether a quick model tries every token, and a slow one rewrites some: what `throughput.shared` describes."""
    if len(routing.moves) != 2:
        return False
    return routing.moves[1][0] > 0.99 and routing.commits[0][1] < 0.01 and abs(routing.commits[1][0] - 1) < 0.01


def predicted(
    routing: Routing, times: Sequence[StepTimes], thresholds: Sequence[int], requests: int, *, shared: bool = True
) -> float:
    """Tokens per second with these thresholds, on one device, or else on one for each run."""
    if shared and is_pair(routing) and thresholds[0] == 1:
        return throughput.shared(routing.moves[0][1], times, min(thresholds[1], requests), requests)
    schedule = Schedule(shared=shared, thresholds=tuple(thresholds))
    traces = [random_trace(routing, seed) for seed in range(requests)]
    return simulate(traces, times, schedule, tokens=TOKENS).throughput


def best(
    routing: Routing, times: Sequence[StepTimes], requests: int, edges: Sequence[int], *, shared: bool = True
) -> tuple[int, ...]:
    """The thresholds with the highest predicted throughput, among `edges`.

    The quick model never waits; the others' thresholds are climbed one after another, the slowest first. Nobody waits
    where requests have moved so little that, by what was seen, they never come to write.
    """
    if routing.writes < LEAST:
        return (1,) * len(times)
    options = [edge for edge in edges if edge <= requests]
    if shared and is_pair(routing):
        return 1, throughput.best_shared(routing.moves[0][1], times, requests, options)[0]
    chosen = [1] * len(times)
    for i in reversed(range(1, len(times))):
        score = lambda b, i=i: predicted(routing, times, [*chosen[:i], b, *chosen[i + 1 :]], requests, shared=shared)
        chosen[i] = max(options, key=score)
    return tuple(chosen)
