"""The scheduler on a virtual clock: the policies of `policy`, measured step times, and no model at all.

A request is its trace: the runs it takes one after another, each by some model, committing some tokens. What a run
costs follows from its rows and from the suffixes that they have not read yet, as in the engine.
"""

import bisect
import collections
import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from molora_jax.config import UserError
from molora_jax.engine import policy
from molora_jax.engine.throughput import Routing, Times

Visit = tuple[int, int]
"""(model, tokens committed by its run)."""

RESOLUTION = 1e-9
"""Seconds that count as the same moment: sums of step times that should be equal differ by rounding."""


def random_trace(routing: Routing, seed: int) -> Iterator[Visit]:
    """Runs without end, by the probabilities of `routing`, from model 0 on."""
    uniform, model = random.Random(seed).random, 0
    sums = [list(itertools.accumulate(row)) for row in routing.moves]
    while True:
        following = bisect.bisect_right(sums[model], uniform() * sums[model][-1])
        yield model, round(routing.commits[model][following])
        model = following


def recorded_trace(writers: Iterable[int]) -> Iterator[Visit]:
    """The runs behind a recorded answer, from who wrote each token: model 0 tries each, and is dropped for another."""
    for writer in writers:
        if writer:
            yield 0, 0
        yield writer, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """How models are run.

    Attributes:
      kind: `delayed` waits for the thresholds (all at 1: eager); `lockstep` runs the models in turn, each for all that
        wait for it; `step_sync` runs all models that anybody waits for at once, and goes on when the last one ends.
      shared: all models on one device, one run at a time; else one device each.
      thresholds: B of each model (`delayed`), clamped as requests leave.
      max_wait: seconds after which a model runs whoever waits.
    """

    kind: Literal["delayed", "lockstep", "step_sync"] = "delayed"
    shared: bool = False
    thresholds: tuple[int, ...] = (1, 1)
    max_wait: float = math.inf

    def __post_init__(self):
        if self.kind not in ("delayed", "lockstep", "step_sync"):
            raise UserError(f"kind: got {self.kind!r}, expected delayed, lockstep or step_sync")
        if min(self.thresholds) < 1:
            raise UserError(f"thresholds: got {self.thresholds}, expected at least 1 each")


@dataclasses.dataclass
class Outcome:
    """What happened on the virtual clock; the lists have an entry a model.

    Attributes:
      tokens: committed.
      seconds: on the clock at the end.
      runs, rows, read, busy: times the model ran, rows and suffix tokens of all its runs together, seconds it ran.
      waited: seconds that requests waited for it, all together.
      finished: requests that came to their end; aborted ones do not.
    """

    tokens: int
    seconds: float
    runs: list[int]
    rows: list[int]
    read: list[int]
    busy: list[float]
    waited: list[float]
    finished: int = 0

    @property
    def throughput(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclasses.dataclass
class _Request:
    trace: Iterator[Visit]
    length: int
    anchors: list[int]
    commits: int = 0
    since: float = 0.0  # when it began to wait
    gone: bool = False


class _Clock:
    """The state of a simulation."""

    def __init__(self, traces: Sequence[Iterable[Visit]], times: Sequence[Times], schedule: Schedule, prompt: int):
        size = len(times)
        self.times, self.schedule, self.models = times, schedule, range(size)
        self.now, self.active = 0.0, len(traces)
        self.waiting = [collections.deque() for _ in self.models]
        self.running: list[tuple[float, list[_Request]] | None] = [None] * size
        self.out = Outcome(0, 0.0, [0] * size, [0] * size, [0] * size, [0.0] * size, [0.0] * size)
        self.thresholds = policy.clamp(np.array(schedule.thresholds), self.active)
        self.requests = [_Request(iter(trace), prompt, [0] * size) for trace in traces]
        for request in self.requests:
            self.move(request)

    def move(self, request: _Request) -> None:
        """To the queue of the model that the request needs next, or out."""
        visit = next(request.trace, None)
        if visit is None or request.gone:
            self.out.finished += not request.gone
            self.leave()
            return
        model, request.commits = visit
        request.since = self.now
        self.waiting[model].append(request)

    def abort(self, request: _Request) -> None:
        """Takes a request out at once if it waits, and at the end of its run if it runs."""
        for queue in self.waiting:
            if request in queue:
                queue.remove(request)
                self.leave()
        request.gone = True

    def leave(self) -> None:
        """One request fewer, which may be too few for the thresholds."""
        self.active -= 1
        self.thresholds = policy.clamp(np.array(self.schedule.thresholds), self.active)

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Per model: how many wait, and how long the oldest has."""
        oldest = [self.now - queue[0].since + RESOLUTION if queue else 0.0 for queue in self.waiting]
        return np.array([len(queue) for queue in self.waiting]), np.array(oldest)

    def begin(self, model: int) -> float:
        """Starts a run for those who wait; returns its seconds."""
        queue = self.waiting[model]
        batch = [queue.popleft() for _ in range(len(queue))]
        suffix = sum(max(request.length - request.anchors[model], 1) for request in batch)
        seconds = self.times[model](len(batch), suffix)
        self.running[model] = self.now + seconds, batch
        out = self.out
        out.runs[model] += 1
        out.rows[model] += len(batch)
        out.read[model] += suffix
        out.busy[model] += seconds
        out.waited[model] += sum(self.now - request.since for request in batch)
        return seconds

    def end(self, model: int) -> None:
        """Ends the model's run: commits its tokens, and sends the requests on."""
        _, batch = self.running[model]
        self.running[model] = None
        for request in batch:
            request.anchors[model] = request.length
            request.length += request.commits
            self.out.tokens += request.commits
            self.move(request)

    def launch(self) -> None:
        """Starts every run that the policy asks for now."""
        limit = self.schedule.max_wait
        waiting, oldest = self.counts()
        if self.schedule.shared:
            if not any(self.running):
                self.begin(int(policy.pick(waiting, oldest, self.thresholds, limit)))
            return
        for model in self.models:
            if not self.running[model] and policy.ready(model, waiting, oldest, self.thresholds, limit):
                self.begin(model)

    def expiry(self) -> float:
        """When an idle model's oldest request will have waited too long."""
        idle = (queue[0].since for queue, run in zip(self.waiting, self.running, strict=True) if queue and not run)
        blocked = self.schedule.shared and any(self.running)
        return math.inf if blocked else min((since + self.schedule.max_wait for since in idle), default=math.inf)

    def advance(self, abort_at: float) -> None:
        """Launches what may be launched, and goes to the next moment at which anything happens."""
        self.launch()
        ends = [run[0] for run in self.running if run]
        following = min([*ends, self.expiry(), abort_at])
        if following == math.inf:
            raise RuntimeError("stalled: requests wait, and nothing runs")
        self.now = max(following, self.now)
        for model in self.models:
            if self.running[model] and self.running[model][0] <= self.now + RESOLUTION:
                self.end(model)

    def round(self) -> None:
        """One round of lockstep or of step-synchronous scheduling."""
        if self.schedule.kind == "lockstep":
            for model in self.models:
                if self.waiting[model]:
                    self.now += self.begin(model)
                    self.end(model)
            return
        chosen = [model for model in self.models if self.waiting[model]]
        seconds = [self.begin(model) for model in chosen]
        self.now += sum(seconds) if self.schedule.shared else max(seconds)
        for model in chosen:
            self.end(model)


def simulate(
    traces: Sequence[Iterable[Visit]],
    times: Sequence[Times],
    schedule: Schedule,
    *,
    tokens: float = math.inf,
    prompt: int = 1,
    aborts: Mapping[int, float] | None = None,
) -> Outcome:
    """Runs one request for each trace, all from time 0, until `tokens` are committed or all requests have left.

    Args:
      times: of each model, seconds of a run of (rows, suffix tokens).
      prompt: tokens that every model has to read before its first.
      aborts: when which request, by its index, is taken out.
    """
    clock = _Clock(traces, times, schedule, prompt)
    pending = sorted((at, index) for index, at in (aborts or {}).items())
    while clock.active and clock.out.tokens < tokens:
        while pending and pending[0][0] <= clock.now:
            clock.abort(clock.requests[pending.pop(0)[1]])
        if not clock.active:
            break
        if schedule.kind == "delayed":
            clock.advance(pending[0][0] if pending else math.inf)
        else:
            clock.round()
    clock.out.seconds = clock.now
    return clock.out
