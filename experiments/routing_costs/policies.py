"""One routed engine under different policies: when a model runs, and how often the host looks."""

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np

from experiments.routing_costs.pair import PROMPT
from molora_jax.engine.request import Request
from molora_jax.engine.routed import RoutedEngine
from molora_jax.engine.simulate import Schedule, recorded_trace, simulate
from molora_jax.engine.throughput import StepTimes


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


def predict(times: Sequence[StepTimes], share: float, threshold: int, requests: int, new: int) -> float:
    """Tokens per second that a pair promises on one device: the median of traces drawn from five seeds.

    The simulator runs the engine's own policy on them, from prompts that nobody has read to the last request's end.
    """
    schedule, rates = Schedule(shared=True, thresholds=(1, threshold)), []
    for seed in range(5):
        writers = np.random.default_rng(seed).random((requests, new)) < share
        traces = [recorded_trace(own.astype(int).tolist()) for own in writers]
        rates.append(simulate(traces, times, schedule, prompt=PROMPT).throughput)
    return float(np.median(rates))
