"""Continuous batching of requests that a program routes between models which run apart, each at its own pace."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from molora_jax.config import UserError
from molora_jax.engine import tuning
from molora_jax.engine.blueprint import Blueprint, Model, check_adapters
from molora_jax.engine.front import Front, Running
from molora_jax.engine.fused import Counts, Schedule, part
from molora_jax.engine.lodging import Guest
from molora_jax.engine.loop import taken
from molora_jax.engine.messages import Entrance, Kind, Message, News, forms, read_text
from molora_jax.engine.processes import Processes, Source
from molora_jax.engine.request import EngineConfig, Event, Request
from molora_jax.engine.run import Fleet
from molora_jax.engine.subserver import Subserver
from molora_jax.engine.table import Entry, without_drafts
from molora_jax.engine.threads import Threads
from molora_jax.engine.timing import Times
from molora_jax.routing.program import Mode, Program
from molora_jax.routing.turn import Turn
from molora_jax.typing import Params

POLL = 0.1
"""Most seconds that `step` waits for news."""


class SeparateEngine(Front):
    """Routes as `RoutedEngine` does, to the same tokens; every model has a subserver, in a thread or a process.

    It holds threads or processes until it is closed, which `with` does. `looks` and `seconds` add up all subservers'.
    """

    def __init__(self, blueprint: Blueprint, params: Params, workers: Threads | Processes):
        """`params` are the program's; `workers` run the subservers. See `in_threads` and `in_processes`.

        Raises:
          UserError: a program that contradicts itself or needs another number of models, or sizes that cannot be.
        """
        self._workers, self._failure = None, None
        self._ready: set[int] = set()
        self._heard: list[Event] = []  # while nobody asked
        self._measured: dict[int, Times] = {}
        super().__init__(blueprint, params)
        self._lately = self.counts  # each time the thresholds are chosen anew, the past counts half
        self._workers = workers
        self.close = weakref.finalize(self, workers.close)
        workers.start()

    def __enter__(self) -> "SeparateEngine":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    @property
    def kv_bytes(self) -> int:
        """Size of the models' KV tables."""
        sizes = zip(self.blueprint.pages, self.blueprint.page_bytes, strict=True)
        return sum(count * size for count, size in sizes)

    @property
    def schedule(self) -> Schedule:
        """How all subservers decide when to run; may be set at any time. `max_wait` counts seconds of the clock."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        arrays = schedule.thresholds, schedule.max_wait, schedule.seconds
        kinds = np.int32, np.float32, np.float32
        self._schedule = Schedule(*(np.asarray(value, kind) for value, kind in zip(arrays, kinds, strict=True)))
        if self._workers is not None:  # they begin with the same
            self._tell_all(Message(Kind.SCHEDULE, self._schedule))

    def warm_up(self, progress: Callable[..., Iterable] = lambda programs, **_: programs) -> None:
        """Waits until all subservers have compiled everything; `progress` may wrap the iteration."""
        self._check_alive()
        self._depart(0, 1, {})
        for i in progress(range(len(self.fleet.cfgs)), total=len(self.fleet.cfgs)):
            while len(self._ready) <= i:
                self._heard += self._hear()

    def time(self, context: int = 128, repeats: int = 5) -> Times:
        """Measures all choices in contexts of `context` tokens, for the schedule; before any request.

        One subserver after another, so that those that share a device or cores do not disturb each other: together they
        may be slower than this.
        """
        if self.busy:
            raise UserError("time: got an engine with requests, expected an idle one: its slots are needed")
        self._measured.clear()
        for i in range(len(self.fleet.cfgs)):
            self._workers.post(i, Message(Kind.TIME, (np.int32(context), np.int32(repeats))))
            while i not in self._measured:
                self._hear()
        seconds = np.zeros((len(self.plan.choices), 3), np.float32)
        for i, times in self._measured.items():
            seconds[part(self.plan, i)] = times.seconds
        self.schedule = dataclasses.replace(self.schedule, seconds=seconds)
        return Times(seconds, max(times.look for times in self._measured.values()))

    def tune(self, requests: int | None = None) -> tuple[int, ...]:
        """Sets the thresholds that promise most for `requests` at once, as they have moved lately; see `time`."""
        look = max((times.look for times in self._measured.values()), default=0.0)
        times = tuning.step_times(self.plan, self.schedule.seconds, look)
        requests, options = requests or self.config.max_rows, range(1, self.config.max_rows + 1)
        best = tuning.best(tuning.routing(self._lately), times, requests, options, shared=False)
        self._lately = jax.tree.map(lambda count: count // 2, self._lately)
        self.schedule = dataclasses.replace(self.schedule, thresholds=np.array(best, np.int32))
        return best

    def submit(self, request: Request) -> int:
        self._check_alive()
        return super().submit(request)

    def step(self) -> list[Event]:
        """Admits what fits, and tells what has come from the subservers, for which it waits a moment.

        Raises:
          UserError: a subserver has failed; so does everything later.
        """
        self._check_alive()
        self._admit()
        events, self._heard = self._heard, []
        return events + (self._hear() if self._running else [])

    def _hear(self) -> list[Event]:
        self._check_alive()
        events = []
        for message in taken(self._workers.inbox, POLL):
            if message.kind == Kind.NEWS:
                events += self._news(*message.payload)
            elif message.kind == Kind.READY:
                self._ready.add(int(message.payload))
            elif message.kind == Kind.TIMES:
                index, seconds, look = message.payload
                self._measured[int(index)] = Times(np.asarray(seconds), float(look))
            else:
                index, line = message.payload
                self._failure = f"subserver of models[{index}]: ended with {read_text(line)}; start the engine anew"
                self.close()
                self._check_alive()
        return events

    def _news(self, index: np.ndarray, news: News) -> list[Event]:
        self._count(int(index), news)
        columns = {{"experts": "adapters"}.get(name, name): column for name, column in news.columns.items()}
        events = []
        for row, (number, count, over) in enumerate(zip(news.number, news.count, news.over, strict=True)):
            running = self._running.get(int(number))  # None: aborted in the meantime
            if running is not None:
                told = {name: column[row, :count].tolist() for name, column in columns.items()}
                events.append(self._event(running, told, over=bool(over)))
        return [event for event in events if event]

    def _count(self, index: int, news: News) -> None:
        own = part(self.plan, index)
        wide = {name: np.zeros(len(self.plan.choices), np.int32) for name in ("runs", "rows", "read")}
        for name, values in wide.items():
            values[own] = getattr(news.counts, name)
        counts = Counts(**wide, moves=news.counts.moves, commits=news.counts.commits)
        self.counts, self._lately = (jax.tree.map(np.add, old, counts) for old in (self.counts, self._lately))
        self.looks, self.seconds = self.looks + 1, self.seconds + float(news.seconds)

    def _lodge(self, guest: Guest, turn: Turn) -> bool:
        """Every subserver finds pages for those that it is to run."""
        return True

    def _place(self, running: Running, entry: Entry) -> None:
        row = jax.device_get(without_drafts(entry.row))
        number, slot = np.int32(running.id), np.int32(running.guest.slot)
        # whoever runs it first is told last, and so hands it on to subservers that know of it
        size = np.int32(running.guest.size)
        for i in sorted(range(len(entry.tables)), key=lambda i: i == row.journey.turn.model):
            self._workers.post(i, Message(Kind.ENTER, Entrance(number, slot, row, size)))

    def _remove(self, running: Running) -> None:
        ended = np.array([running.id], np.int32), np.array([running.guest.slot], np.int32)
        self._tell_all(Message(Kind.STOP, ended))

    def _set_knobs(self, running: Running, values) -> None:
        given = {name: np.float32(values.get(name, 0)) for name in self.program.knobs}
        changed = {name: np.bool_(name in values) for name in self.program.knobs}
        self._tell_all(Message(Kind.KNOBS, (np.int32(running.guest.slot), given, changed)))

    def _tell_all(self, message: Message) -> None:
        for i in range(len(self.fleet.cfgs)):
            self._workers.post(i, message)

    def _check_alive(self) -> None:
        if self._failure:
            raise UserError(self._failure)
        if not self.close.alive:
            raise UserError("engine: got one that was closed, expected an open one")


def in_threads(
    models: Sequence[Model],
    program: Program,
    params: Params | None = None,
    config: EngineConfig = EngineConfig(),
    *,
    entropy: bool = False,
    kv_bytes: int | None = None,
    shadow: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> SeparateEngine:
    """An engine with a thread per model, given from the quickest to the slowest; arguments as of `RoutedEngine`.

    Args:
      shadow: whether models read the prompts of requests that others run, while they have nothing else to do: then the
        first hand-over need not wait for that.
      devices: of each model, counted around; by default all there are.

    Raises:
      UserError: a program that fuses models, and as `SeparateEngine` does.
    """
    _check_modes(program)
    check_adapters(models)
    fleet = Fleet(tuple(model.cfg for model in models), program)
    dtypes, has = tuple(model.dtype for model in models), any(model.adapters is not None for model in models)
    kept = dict(experts=has, entropy=entropy, kv_bytes=kv_bytes, shadow=shadow)
    blueprint = Blueprint(fleet, config, dtypes, **kept)
    params, devices = params or {}, devices or jax.devices()
    build = lambda i, model: Subserver(i, blueprint, model, params, devices[i % len(devices)])
    threads = Threads([functools.partial(build, i, model) for i, model in enumerate(models)])
    return SeparateEngine(blueprint, params, threads)


def in_processes(
    models: Sequence[Source],
    program: Source,
    config: EngineConfig = EngineConfig(),
    *,
    entropy: bool = False,
    kv_bytes: int | None = None,
    shadow: bool = False,
) -> SeparateEngine:
    """An engine with a process per model, given from the quickest to the slowest, that loads its model by itself.

    Raises:
      UserError: a model or program that cannot be loaded, and as `in_threads` does.
    """
    routing, params = program.load()
    _check_modes(routing)
    processes = Processes(models, program)
    try:
        blueprint = processes.meet(routing, config, entropy=entropy, kv_bytes=kv_bytes, shadow=shadow)
        departures = blueprint.departures(params)
        processes.inbox.forms = forms(jax.eval_shape(lambda: blueprint.table(departures)))
        return SeparateEngine(blueprint, params, processes)
    except UserError:
        processes.close()
        raise


def _check_modes(program: Program) -> None:
    if Mode.FUSE in program.modes:
        raise UserError(
            f"program: got {type(program).__name__}, which fuses logits of all models, expected one that runs them one "
            "at a time: use an engine with all models on one device"
        )
