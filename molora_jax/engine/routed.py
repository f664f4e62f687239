"""Continuous batching of requests that a program routes between several models on one device."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.config import UserError
from molora_jax.engine import fused, timing, tuning
from molora_jax.engine.blueprint import Blueprint, Model, check_adapters
from molora_jax.engine.front import Front, Running
from molora_jax.engine.fused import Counts, Plan, super_step
from molora_jax.engine.journey import at
from molora_jax.engine.lodging import Guest
from molora_jax.engine.request import EngineConfig, Event, Request
from molora_jax.engine.run import Fleet, Weights
from molora_jax.engine.table import Entry, RequestTable, enter, settle, stop
from molora_jax.engine.timing import Load, Times
from molora_jax.routing.program import Program, undeclared
from molora_jax.routing.turn import Turn
from molora_jax.typing import Array, Bool, Int, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _News:
    """What the host learns from one look: of every slot, final tokens not told yet, W at most, and its next run, `NONE`
    if the program did not say that it would ask for it."""

    columns: dict[str, Array]
    final: Int[Array, "S"]
    active: Bool[Array, "S"]
    awaits: Int[Array, "S"]
    counts: Counts


class RoutedEngine(Front):
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
        tune_every: int = 0,
    ):
        """Args:
          params: the program's.
          entropy: whether to keep that of every token's distribution.
          tune_every: looks of the host after which the thresholds are chosen anew, from how requests have moved lately;
            0 leaves them to `tune`.
          kv_bytes: of the models' KV tables together, if they shall be smaller than all requests could need: then a
            model may have to read a request again that had to make room for others. `config.pages` has one for each
            model.

        Raises:
          UserError: a program that contradicts itself or needs another number of models, or sizes that cannot be.
        """
        adapters = tuple(model.adapters for model in models)
        dtypes, has = tuple(model.dtype for model in models), any(each is not None for each in adapters)
        fleet = Fleet(tuple(model.cfg for model in models), program)
        check_adapters(models)
        kept = dict(experts=has, entropy=entropy, kv_bytes=kv_bytes)
        super().__init__(Blueprint(fleet, config, dtypes, **kept), params or {})
        self.weights = Weights(tuple(model.params for model in models), adapters, params or {})
        self._table = self.blueprint.table(self._depart)
        self._memories = tuple(self.blueprint.memory(i) for i in range(len(models)))
        self.block, self._look_seconds, self._tune_every = config.block, 0.0, tune_every
        self._lately = self.counts  # each time the thresholds are chosen anew, the past counts half

    @property
    def kv_bytes(self) -> int:
        """Size of the models' KV tables."""
        return sum(leaf.nbytes for memory in self._memories for leaf in jax.tree.leaves(memory.state))

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

    def time(self, context: int = 128, repeats: int = 5) -> Times:
        """Measures all choices in contexts of `context` tokens, for the schedule; before any request."""
        if self.busy:
            raise UserError("time: got an engine with requests, expected an idle one: its slots are needed")
        kept, context = (self.counts, self._lately), min(context, self.config.max_length - 1)
        request, guests = Request(prompt=[0] * context, max_new_tokens=1), []
        while self.lodging.free:  # each reads pages of its own, if there are so many
            guests.append(self.lodging.seat(self._room(request)))
            for model in range(len(self._memories)):
                self.lodging.lodge(guests[-1], model)
            entry = self._entry(request, self._journey(request), guests[-1])
            self._memories, self._table = self._enter(self._memories, self._table, np.int32(guests[-1].slot), entry)
        measured = timing.measure(self.plan, functools.partial(self._timed, context), context, repeats)
        self._table = self._stop(self._table, np.ones(self.config.max_rows, bool))
        for guest in reversed(guests):
            self.lodging.give_back(guest)
        (self.counts, self._lately), self.looks, self.seconds = kept, 0, 0.0
        self.schedule, self._look_seconds = dataclasses.replace(self.schedule, seconds=measured.seconds), measured.look
        return measured

    def _timed(self, context: int, choice: int, load: Load) -> float:
        self._table = jax.block_until_ready(timing.loaded(self._table, context, load, self.config.max_length))
        before = self.seconds
        self._run(int(choice != fused.NONE), forced=choice)
        return self.seconds - before

    def tune(self, requests: int | None = None) -> tuple[int, ...]:
        """Sets the thresholds that promise most for `requests` at once, as they have moved lately.

        Each run also takes its part of the host's look, which comes after `block` of them.
        """
        times = tuning.step_times(self.plan, self.schedule.seconds, self._look_seconds / self.block)
        options = range(1, self.config.max_rows + 1)
        best = tuning.best(tuning.routing(self._lately), times, requests or self.config.max_rows, options)
        self._lately = jax.tree.map(lambda count: count // 2, self._lately)
        self.schedule = dataclasses.replace(self.schedule, thresholds=np.array(best, np.int32))
        return best

    def step(self) -> list[Event]:
        """Admits what fits, lets the models run up to `block` times, and tells what came of it."""
        self._admit()
        if not self._running:
            return []
        news = self._run(self.block, leave=bool(self._waiting))
        self._check_runs(news)
        events = [self._told(running, news) for running in list(self._running.values())]
        self._rehouse(news)
        if self._tune_every and self.looks % self._tune_every == 0:
            self.tune(max(len(self._running), 1))
        return [event for event in events if event]

    def _check_runs(self, news: _News) -> None:
        for running in list(self._running.values()):
            if news.active[running.guest.slot] and news.awaits[running.guest.slot] == fused.NONE:
                self.abort(running.id)
                raise UserError(undeclared(self.program))

    def _lodge(self, guest: Guest, turn: Turn) -> bool:
        """The models that run first need pages, if anybody else runs; other models' come in time."""
        first = self.fleet.readers(next(run for run in self.plan.runs if at(turn, run)))
        if not all(self.lodging.lodge(guest, model) for model in first) and self._running:
            return False
        for model in range(len(self._memories)):
            self.lodging.lodge(guest, model)
        return True

    def _rehouse(self, news: _News) -> None:
        """Finds pages for those whose next run lacks them."""
        guests = [running.guest for running in self._running.values()]
        needs = [self.fleet.readers(self.plan.runs[news.awaits[guest.slot]]) for guest in guests]
        for guest in self.lodging.rehouse(guests, needs):
            given = self._lodged(guest), tuple(self.lodging.tables(guest))
            self._memories, self._table = self._settle(self._memories, self._table, np.int32(guest.slot), *given)

    def _place(self, running: Running, entry: Entry) -> None:
        slot = np.int32(running.guest.slot)
        self._memories, self._table = self._enter(self._memories, self._table, slot, entry)

    def _remove(self, running: Running) -> None:
        mask = np.zeros(self.config.max_rows, bool)
        mask[running.guest.slot] = True
        self._table = self._stop(self._table, mask)

    def _set_knobs(self, running: Running, values) -> None:
        slot, journey = running.guest.slot, self._table.journey
        new = {name: journey.knobs[name].at[slot].set(value) for name, value in values.items()}
        journey = dataclasses.replace(journey, knobs=journey.knobs | new)
        self._table = dataclasses.replace(self._table, journey=journey)

    @property
    def _nobody(self) -> Guest:
        return Guest(0, 0, [[] for _ in self._memories])

    @functools.cached_property
    def _enter(self) -> jax.stages.Compiled:
        request = Request(prompt=[0])
        row = self._entry(request, self._journey(request), self._nobody)
        lowered = jax.jit(enter, donate_argnums=(0, 1)).lower(self._memories, self._table, np.int32(0), row)
        return lowered.compile()

    @functools.cached_property
    def _settle(self) -> jax.stages.Compiled:
        given = np.int32(0), self._lodged(self._nobody), tuple(self.lodging.tables(self._nobody))
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
        seconds = self.schedule.seconds + np.array([self._look_seconds / max(steps, 1), 0, 0], np.float32)
        begun = time.perf_counter()
        self._memories, self._table, news = self._step(
            self.weights,
            dataclasses.replace(self.schedule, seconds=seconds),  # of a run, its part of the look included
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
        self.counts, self._lately = (jax.tree.map(np.add, old, news.counts) for old in (self.counts, self._lately))
        return news

    def _told(self, running: Running, news: _News) -> Event | None:
        slot = running.guest.slot
        count = min(int(news.final[slot]) - running.sent, news.columns["tokens"].shape[1])
        columns = {name: column[slot, :count].tolist() for name, column in news.columns.items()}
        return self._event(running, columns, over=not news.active[slot] and running.sent + count == news.final[slot])


def _look(plan: Plan, weights, schedule, memories, table: RequestTable, told: Int[Array, "S"], steps, leave, forced):
    """A super-step, and of every slot the final tokens from `told` on."""
    nobody = jnp.zeros_like(table.active)
    args = weights, schedule, memories, table, steps, leave, forced, nobody
    memories, table, counts, _ = super_step(plan, *args)
    width, most = 2 * plan.steps + plan.fleet.program.draft, table.tokens.shape[1]
    cells = jnp.arange(told.shape[0])[:, None], jnp.minimum(told[:, None] + jnp.arange(width), most - 1)
    columns = dict(tokens=table.tokens, logprobs=table.logprobs, writers=table.journey.writers)
    columns |= dict(adapters=table.experts, entropy=table.journey.entropy)
    columns = {name: column[cells] for name, column in columns.items() if column is not None}
    turn = table.journey.turn
    reaches = jnp.stack([at(turn, run) for run in plan.runs])
    awaits = jnp.where(jnp.any(reaches, axis=0), jnp.argmax(reaches, axis=0), fused.NONE)
    return memories, table, _News(columns, table.length - turn.hold, table.active, awaits, counts)
