"""Continuous batching of requests that a program routes between several models on one device."""

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.config import ModelConfig, UserError
from molora_jax.engine import buckets as bucketing
from molora_jax.engine import fused, tuning
from molora_jax.engine.experts import Adapters
from molora_jax.engine.fused import Counts, Plan, Schedule, super_step
from molora_jax.engine.journey import Departures, Journey, at
from molora_jax.engine.lodging import Guest, Lodging, pages_within
from molora_jax.engine.request import EngineConfig, Event, Request, check, entry, gather
from molora_jax.engine.run import Fleet, Weights
from molora_jax.engine.table import Entry, RequestTable, enter, new_memory, new_table, settle, stop
from molora_jax.models.state import kv_rows
from molora_jax.routing.program import Program, knob_values
from molora_jax.routing.program import check as check_program
from molora_jax.typing import Array, Bool, Int, Params


@dataclasses.dataclass(frozen=True)
class Model:
    """One of the models that requests are routed between.

    Attributes:
      adapters: its experts, which the program's decisions index; None if it has none.
    """

    cfg: ModelConfig
    params: Params
    adapters: Adapters | None = None


@dataclasses.dataclass
class _Running:
    """The host's view of a request that has a slot; `sent` of its tokens have been told, the prompt's among them."""

    id: int
    request: Request
    guest: Guest
    sent: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _News:
    """What the host learns from one look: of every slot, final tokens not told yet, W at most, and its next run."""

    columns: dict[str, Array]
    final: Int[Array, "S"]
    active: Bool[Array, "S"]
    awaits: Int[Array, "S"]
    counts: Counts


class RoutedEngine:
    """Runs requests on several models by a routing program; models are given from the quickest to the slowest."""

    def __init__(
        self,
        models: Sequence[Model],
        program: Program,
        params: Params | None = None,
        config: EngineConfig = EngineConfig(),
        *,
        entropy: bool = False,
        kv_bytes: int | None = None,
    ):
        """Args:
          params: the program's.
          entropy: whether to keep that of every token's distribution.
          kv_bytes: of the models' KV tables together, if they shall be smaller than all requests could need: then a
            model may have to read a request again that had to make room for others. `config.pages` has one for each
            model.

        Raises:
          UserError: a program that contradicts itself or needs another number of models, or sizes that cannot be.
        """
        bucketing.check(config.max_rows, config.prefill_chunk)
        _check(models, program, config)
        self.program, self.config = program, config
        self.fleet = Fleet(tuple(model.cfg for model in models), program)
        adapters = tuple(model.adapters for model in models)
        self.weights = Weights(tuple(model.params for model in models), adapters, params or {})
        chunk = min(config.prefill_chunk, config.max_length)
        self.plan = fused.plan(self.fleet, config.max_rows, chunk, config.block)
        self.schedule = _eager(self.plan)
        # a request may go back by any number of tokens, so that windowed layers keep all pages too
        length = config.max_length + len(program.score_tokens)
        most = config.max_rows * -(-length // config.page_size)
        pages = config.pages or (most,) * len(models)
        if kv_bytes is not None:
            pages = pages_within(kv_bytes, [_page_bytes(model, config.page_size) for model in models], most)
        self.lodging = Lodging(pages, slots=config.max_rows, length=length, page_size=config.page_size)
        dtype = jnp.result_type(*(_dtype(model.params) for model in models))
        sizes = dict(length=config.max_length, vocab=self.fleet.vocab, dtype=dtype)
        self._depart = Departures(program, self.weights.program, **sizes, entropy=entropy)
        has = any(each is not None for each in adapters)
        kept = dict(models=len(models), experts=has, journey=self._depart.empty(config.max_rows))
        self._table = new_table(config.max_rows, config.max_length, **kept)
        self._memories = ()
        for model, count in zip(models, pages, strict=True):
            own = dict(pages=(count,) * len(model.cfg.kinds), page_size=config.page_size, dtype=_dtype(model.params))
            self._memories += (new_memory(model.cfg, config.max_rows, length, **own),)
        self._waiting: collections.deque[tuple[int, Request]] = collections.deque()
        self._running: dict[int, _Running] = {}
        self._ids = itertools.count()
        self.counts = jax.device_get(Counts.zero(self.plan))
        self.looks, self.seconds = 0, 0.0
        self.block = config.block

    @property
    def kv_bytes(self) -> int:
        """Size of the models' KV tables."""
        return sum(leaf.nbytes for memory in self._memories for leaf in jax.tree.leaves(memory.state))

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._running)

    def warm_up(self, progress: Callable[..., Iterable] = lambda programs, **_: programs) -> None:
        """Compiles everything; `progress` may wrap the iteration to show how far it is (tqdm does)."""
        programs = (
            lambda: self._depart(0, 1, {}),
            lambda: self._enter,
            lambda: self._settle,
            lambda: self._stop,
            lambda: self._step,
        )
        for program in progress(programs, total=len(programs)):
            program()

    def time(self, context: int = 128, repeats: int = 5) -> np.ndarray:
        """Measures the seconds of every choice, in contexts of `context` tokens, for the schedule; before any request.

        Returns:
          The least of `repeats` of each: [P].
        """
        if self.busy:
            raise UserError("time: got an engine with requests, expected an idle one: its slots are needed")
        counts, seconds = self.counts, []
        context = min(context, self.config.max_length - 1)
        request, nobody = Request(prompt=[0] * context), Guest(0, 0, [[] for _ in self._memories])
        row = self._entry(request, self._journey(request), nobody)
        for slot in range(self.config.max_rows):
            self._memories, self._table = self._enter(self._memories, self._table, np.int32(slot), row)
        for choice, (run, bucket) in enumerate(self.plan.choices):
            unread = min(max(bucket.tokens // bucket.rows - len(self.fleet.tail(run)), 0), context)
            seconds.append(min(self._timed(choice, context, unread) for _ in range(repeats)))
        nothing = min(self._timed(fused.NONE, context, 1) for _ in range(repeats))
        self._table = self._stop(self._table, np.ones(self.config.max_rows, bool))
        self.counts, self.looks, self.seconds = counts, 0, 0.0
        measured = np.maximum(np.array(seconds) - nothing, 1e-6).astype(np.float32)
        self.schedule = dataclasses.replace(self.schedule, seconds=measured)
        return measured

    def _timed(self, choice: int, length: int, unread: int) -> float:
        table, slots = self._table, self.config.max_rows
        full = lambda leaf, value: jnp.full_like(leaf, value)
        anchor, limit = full(table.anchor, length - unread), full(table.limit, self.config.max_length)
        fields = dict(length=full(table.length, length), anchor=anchor, limit=limit, active=jnp.ones(slots, bool))
        self._table = jax.block_until_ready(dataclasses.replace(table, **fields))
        before = self.seconds
        self._run(int(choice != fused.NONE), forced=choice)
        return self.seconds - before

    def tune(self, requests: int | None = None) -> tuple[int, ...]:
        """Sets the thresholds that promise most for `requests` at once, as they have moved so far."""
        times = tuning.step_times(self.plan, self.schedule.seconds)
        options = range(1, self.config.max_rows + 1)
        best = tuning.best(tuning.routing(self.counts), times, requests or self.config.max_rows, options)
        self.schedule = dataclasses.replace(self.schedule, thresholds=np.array(best, np.int32))
        return best

    def submit(self, request: Request) -> int:
        """Queues a request; its number comes back in the events of `step`.

        Raises:
          UserError: a request that can never run, or that asks for something out of range.
        """
        check(min(self.fleet.cfgs, key=lambda cfg: cfg.vocab), self.config, request)
        if request.adapter is not None or request.route is not None:
            got = request.adapter or request.route
            raise UserError(f"adapter: got {got!r}, expected none: the routing program chooses the adapters")
        knob_values(self.program, request.knobs)
        self.lodging.check(self._room(request))
        number = next(self._ids)
        self._waiting.append((number, request))
        return number

    def abort(self, number: int) -> None:
        """Ends a request wherever it is; it gives no further event."""
        self._waiting = collections.deque(item for item in self._waiting if item[0] != number)
        if number in self._running:
            mask = np.zeros(self.config.max_rows, bool)
            mask[self._running[number].guest.slot] = True
            self._table = self._stop(self._table, mask)
            self._retire(self._running[number])

    def turn(self, number: int, knobs: Mapping[str, float]) -> None:
        """Sets knobs of a request that runs or waits, from its next run on.

        Raises:
          UserError: a knob that the program does not have.
        """
        values = knob_values(self.program, knobs)
        self._waiting = collections.deque(
            (id, dataclasses.replace(request, knobs={**request.knobs, **knobs}) if id == number else request)
            for id, request in self._waiting
        )
        if number in self._running:
            slot, journey = self._running[number].guest.slot, self._table.journey
            new = {name: journey.knobs[name].at[slot].set(values[name]) for name in knobs}
            journey = dataclasses.replace(journey, knobs=journey.knobs | new)
            self._table = dataclasses.replace(self._table, journey=journey)

    def step(self) -> list[Event]:
        """Admits what fits, lets the models run up to `block` times, and tells what came of it."""
        self._admit()
        if not self._running:
            return []
        news = self._run(self.block, leave=bool(self._waiting))
        events = [self._event(running, news) for running in list(self._running.values())]
        self._rehouse(news)
        return [event for event in events if event]

    def run(self, requests: Sequence[Request]) -> list[Event]:
        """Runs `requests` to their ends: one event each, in their order."""
        return gather(self.step, [self.submit(request) for request in requests])

    def _admit(self) -> None:
        """Seats requests for as long as the models that run first have pages; other models' come in time."""
        while self._waiting and self.lodging.free:
            number, request = self._waiting[0]
            guest, journey = self.lodging.seat(self._room(request)), self._journey(request)
            turn = jax.device_get(journey.turn)
            first = self.fleet.readers(next(run for run in self.plan.runs if at(turn, run)))
            if not all(self.lodging.lodge(guest, model) for model in first) and self._running:
                self.lodging.give_back(guest)
                return
            for model in range(len(self._memories)):
                self.lodging.lodge(guest, model)
            self._waiting.popleft()
            self._running[number] = _Running(number, request, guest, len(request.prompt))
            row = self._entry(request, journey, guest)
            self._memories, self._table = self._enter(self._memories, self._table, np.int32(guest.slot), row)

    def _rehouse(self, news: _News) -> None:
        """Finds pages for those whose next run lacks them."""
        guests = [running.guest for running in self._running.values()]
        needs = [self.fleet.readers(self.plan.runs[news.awaits[guest.slot]]) for guest in guests]
        for guest in self.lodging.rehouse(guests, needs):
            given = self._lodged(guest), tuple(self.lodging.tables(guest))
            self._memories, self._table = self._settle(self._memories, self._table, np.int32(guest.slot), *given)

    def _lodged(self, guest: Guest) -> np.ndarray:
        return np.array([guest.lodged(model) for model in range(len(self._memories))])

    def _room(self, request: Request) -> int:
        return len(request.prompt) + request.max_new_tokens + len(self.program.score_tokens)

    def _journey(self, request: Request) -> Journey:
        return self._depart(request.seed, len(request.prompt), request.knobs)

    def _entry(self, request: Request, journey: Journey, guest: Guest) -> Entry:
        journey, experts = dataclasses.replace(journey, lodged=self._lodged(guest)), None
        if self._table.experts is not None:
            experts = np.full(self.config.max_length, int(journey.turn.adapter), np.int32)
        row = entry(self.config, request, anchor=[0] * len(self._memories), experts=experts, journey=journey)
        return Entry(row, tuple(self.lodging.tables(guest)))

    @functools.cached_property
    def _enter(self) -> jax.stages.Compiled:
        request, nobody = Request(prompt=[0]), Guest(0, 0, [[] for _ in self._memories])
        row = self._entry(request, self._journey(request), nobody)
        lowered = jax.jit(enter, donate_argnums=(0, 1)).lower(self._memories, self._table, np.int32(0), row)
        return lowered.compile()

    @functools.cached_property
    def _settle(self) -> jax.stages.Compiled:
        nobody = Guest(0, 0, [[] for _ in self._memories])
        given = np.int32(0), self._lodged(nobody), tuple(self.lodging.tables(nobody))
        return jax.jit(settle, donate_argnums=(0, 1)).lower(self._memories, self._table, *given).compile()

    @functools.cached_property
    def _stop(self) -> jax.stages.Compiled:
        return jax.jit(stop, donate_argnums=0).lower(self._table, np.zeros(self.config.max_rows, bool)).compile()

    @functools.cached_property
    def _step(self) -> jax.stages.Compiled:
        told = np.zeros(self.config.max_rows, np.int32)
        run = jax.jit(functools.partial(_look, self.plan), donate_argnums=(2, 3))
        args = self.weights, self.schedule, self._memories, self._table, told
        return run.lower(*args, np.int32(0), np.bool_(False), np.int32(fused.NONE)).compile()

    def _run(self, steps: int, *, leave: bool = False, forced: int = fused.NONE) -> _News:
        told = np.zeros(self.config.max_rows, np.int32)
        for running in self._running.values():
            told[running.guest.slot] = running.sent
        begun = time.perf_counter()
        self._memories, self._table, news = self._step(
            self.weights,
            self.schedule,
            self._memories,
            self._table,
            told,
            np.int32(steps),
            np.bool_(leave),
            np.int32(forced),
        )
        news = jax.device_get(news)
        self.seconds += time.perf_counter() - begun
        self.looks += 1
        self.counts = jax.tree.map(np.add, self.counts, news.counts)
        return news

    def _event(self, running: _Running, news: _News) -> Event | None:
        slot = running.guest.slot
        count = min(int(news.final[slot]) - running.sent, news.columns["tokens"].shape[1])
        running.sent += count
        told = {name: column[slot, :count].tolist() for name, column in news.columns.items()}
        finished = None
        if not news.active[slot] and running.sent == news.final[slot]:
            finished = self._ending(running, told["tokens"])
            self._retire(running)
        if not told["tokens"] and not finished:
            return None
        logprobs = told.pop("logprobs")
        return Event(running.id, logprobs=logprobs if running.request.logprobs else None, finished=finished, **told)

    def _ending(self, running: _Running, tokens: list[int]) -> str:
        if tokens and tokens[-1] in running.request.stops:
            return "stop"
        whole = running.sent >= len(running.request.prompt) + running.request.max_new_tokens
        return "length" if whole else "gave up"

    def _retire(self, running: _Running) -> None:
        del self._running[running.id]
        self.lodging.give_back(running.guest)


def _look(plan: Plan, weights, schedule, memories, table: RequestTable, told: Int[Array, "S"], steps, leave, forced):
    """A super-step, and of every slot the final tokens from `told` on."""
    memories, table, counts = super_step(plan, weights, schedule, memories, table, steps, leave, forced)
    width, most = 2 * plan.steps + plan.fleet.program.draft, table.tokens.shape[1]
    cells = jnp.arange(told.shape[0])[:, None], jnp.minimum(told[:, None] + jnp.arange(width), most - 1)
    columns = dict(tokens=table.tokens, logprobs=table.logprobs, writers=table.journey.writers)
    columns |= dict(adapters=table.experts, entropy=table.journey.entropy)
    columns = {name: column[cells] for name, column in columns.items() if column is not None}
    turn = table.journey.turn
    awaits = jnp.argmax(jnp.stack([at(turn, run) for run in plan.runs]), axis=0)
    return memories, table, _News(columns, table.length - turn.hold, table.active, awaits, counts)


def _eager(plan: Plan) -> Schedule:
    """Nobody waits, and every choice takes as long as it has tokens, until it is measured."""
    tokens = np.array([bucket.tokens for _, bucket in plan.choices], np.float32)
    return Schedule(np.ones(len(plan.runs), np.int32), np.float32(np.inf), tokens)


def _check(models: Sequence[Model], program: Program, config: EngineConfig) -> None:
    check_program(program)
    name = type(program).__name__
    if len(models) != program.models:
        raise UserError(f"models: got {len(models)}, expected {program.models}: {name} routes between that many")
    if config.pages is not None and len(config.pages) != len(models):
        raise UserError(f"pages: got {len(config.pages)}, expected {len(models)}, one for each model")
    for i, model in enumerate(models):
        if model.adapters is not None and model.adapters.bank.gates:
            raise UserError(
                f"models[{i}]: got experts with gates, expected plain ones: a routed request takes tokens back, which "
                "the state of a gate cannot follow yet"
            )


def _page_bytes(model: Model, page_size: int) -> int:
    cfg = model.cfg
    rows = kv_rows(cfg, (1,) * len(cfg.kinds), page_size)
    return rows * 2 * cfg.kv_width * _dtype(model.params).itemsize


def _dtype(params: Params) -> jnp.dtype:
    return params["embed"]["weight"].dtype
