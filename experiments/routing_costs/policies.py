"""One routed engine under different policies: when a model runs, and how often the host looks."""

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np

from molora_jax.engine import tuning
from molora_jax.engine.request import Request
from molora_jax.engine.routed import RoutedEngine


@dataclasses.dataclass(frozen=True)
class Measured:
    """A batch of requests, run to its end.

    Attributes:
      rate: tokens per second.
      share: of the tokens, written by the last model.
      looks, runs: of the host, and of models, for each token.
      padding: tokens that the buckets had room for, over those that were read.
      rows: mean requests in a run of the last model.
    """

    rate: float
    share: float
    looks: float
    runs: float
    padding: float
    rows: float


def measure(
    engine: RoutedEngine, requests: Sequence[Request], thresholds: Sequence[int], block: int | None = None
) -> Measured:
    """Runs `requests` with these thresholds, `block` runs between two looks of the host (1: it starts every run)."""
    engine.schedule = dataclasses.replace(engine.schedule, thresholds=np.array(thresholds, np.int32))
    engine.block = block or engine.config.block
    counts, looks = engine.counts, engine.looks
    begun = time.perf_counter()
    events = engine.run(requests)
    seconds = time.perf_counter() - begun
    counts = jax.tree.map(np.subtract, engine.counts, counts)
    writers = np.concatenate([event.writers for event in events])
    room = np.array([bucket.tokens for _, bucket in engine.plan.choices])
    last = np.array([run.model == engine.program.models - 1 for run, _ in engine.plan.choices])
    return Measured(
        rate=len(writers) / seconds,
        share=float(np.mean(writers == engine.program.models - 1)),
        looks=(engine.looks - looks) / len(writers),
        runs=float(counts.runs.sum() / len(writers)),
        padding=float((counts.runs * room).sum() / counts.read.sum()),
        rows=float(counts.rows[last].sum() / max(counts.runs[last].sum(), 1)),
    )


def predict(engine: RoutedEngine, share: float, threshold: int, requests: int) -> float:
    """Tokens per second that the throughput model promises for a pair, from the measured step times."""
    times = tuning.step_times(engine.plan, engine.schedule.seconds)
    return tuning.predicted(tuning.Routing.pair(share), times, (1, threshold), requests)


def best(engine: RoutedEngine, share: float, requests: int, options: Sequence[int]) -> int:
    """The large model's threshold that the throughput model chooses."""
    times = tuning.step_times(engine.plan, engine.schedule.seconds)
    return tuning.best(tuning.Routing.pair(share), times, requests, options)[1]


def prefill_seconds(engine: RoutedEngine, tokens: int) -> float:
    """Seconds in which all models read `tokens` of prompts, in their largest buckets."""
    seconds = {
        run: (bucket.tokens, value)
        for (run, bucket), value in zip(engine.plan.choices, engine.schedule.seconds, strict=True)
    }
    return sum(tokens / room * float(value) for room, value in seconds.values())
