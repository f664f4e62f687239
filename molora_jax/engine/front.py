"""What callers see of a routed engine: it checks and admits requests, and tells what came of them."""

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from molora_jax.config import UserError
from molora_jax.engine.blueprint import Blueprint
from molora_jax.engine.fused import Counts, ModelUsage, eager
from molora_jax.engine.journey import Journey, among
from molora_jax.engine.lodging import Guest
from molora_jax.engine.request import EngineConfig, Event, Request, check, check_sizes, entry, run_all
from molora_jax.engine.table import Entry
from molora_jax.routing.program import Program, knob_values, undeclared
from molora_jax.routing.program import check as check_program
from molora_jax.routing.turn import Turn
from molora_jax.typing import Array, Bool, Float, Params


@dataclasses.dataclass
class Running:
    """The host's view of a request that has a slot; `sent` of its tokens have been told, the prompt's among them."""

    id: int
    request: Request
    guest: Guest
    sent: int


class Front:
    """Holds the requests that wait, and the slots of those that run; how and where models run is for subclasses."""

    def __init__(self, blueprint: Blueprint, params: Params):
        """`params` are the program's.

        Raises:
          UserError: a program that contradicts itself or needs another number of models, or sizes that cannot be.
        """
        self.blueprint, self.fleet, self.config = blueprint, blueprint.fleet, blueprint.config
        self.program = self.fleet.program
        check_sizes(self.config)
        _check(self.program, self.config, len(self.fleet.cfgs))
        self.plan = blueprint.plan()
        self.schedule = eager(self.plan)
        self.lodging = blueprint.lodging()
        self._depart = blueprint.departures(params)
        self._waiting: collections.deque[tuple[int, Request]] = collections.deque()
        self._running: dict[int, Running] = {}
        self._ids = itertools.count()
        self.counts = jax.tree.map(lambda count: np.asarray(count, np.int64), Counts.zero(self.plan))
        self.looks, self.seconds = 0, 0.0

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def usage(self) -> list[ModelUsage]:
        """What each model has done so far; of fused runs, the last one."""
        return [ModelUsage.of(self.plan, self.counts, model) for model in range(len(self.fleet.cfgs))]

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
            self._remove(self._running[number])
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
            self._set_knobs(self._running[number], {name: values[name] for name in knobs})

    def step(self) -> list[Event]:
        """Admits what fits, and tells what has come of those that run."""
        raise NotImplementedError

    def run(self, requests: Sequence[Request]) -> list[Event]:
        """Runs `requests` to their ends: one event each, in their order."""
        return run_all(self, requests)

    def _place(self, running: Running, entry: Entry) -> None:
        """Puts an admitted request into its slot."""
        raise NotImplementedError

    def _remove(self, running: Running) -> None:
        """Ends a request where it stands."""
        raise NotImplementedError

    def _set_knobs(self, running: Running, values: Mapping[str, Float[Array, ""]]) -> None:
        """Sets some knobs of a request that has a slot."""
        raise NotImplementedError

    def _lodge(self, guest: Guest, turn: Turn) -> bool:
        """Gives a request its first pages, if there are enough for its first turn."""
        raise NotImplementedError

    def _admit(self) -> None:
        while self._waiting and self.lodging.free:
            number, request = self._waiting[0]
            journey = self._journey(request)
            turn = jax.device_get(journey.turn)
            if not among(turn, self.program.runs):
                self._waiting.popleft()
                raise UserError(undeclared(self.program))
            guest = self.lodging.seat(self._room(request))
            if not self._lodge(guest, turn):
                self.lodging.give_back(guest)
                return
            self._waiting.popleft()
            self._running[number] = running = Running(number, request, guest, len(request.prompt))
            self._place(running, self._entry(request, journey, guest))

    def _room(self, request: Request) -> int:
        return len(request.prompt) + request.max_new_tokens + len(self.program.score_tokens)

    def _journey(self, request: Request) -> Journey:
        return self._depart(request.seed, len(request.prompt), request.knobs)

    def _lodged(self, guest: Guest) -> Bool[np.ndarray, "M"]:
        return np.array([guest.lodged(model) for model in range(len(self.fleet.cfgs))])

    def _entry(self, request: Request, journey: Journey, guest: Guest) -> Entry:
        """The request as it enters its slot."""
        journey, experts = dataclasses.replace(journey, lodged=self._lodged(guest)), None
        if self.blueprint.experts:
            experts = np.full(self.config.max_length, int(journey.turn.adapter), np.int32)
        row = entry(self.config, request, anchor=[0] * len(self.fleet.cfgs), experts=experts, journey=journey)
        return Entry(row, tuple(self.lodging.tables(guest)))

    def _event(self, running: Running, columns: Mapping[str, list], *, over: bool) -> Event | None:
        """What is told of a request: the `columns` of its new tokens, and whether those were the last."""
        running.sent += len(columns["tokens"])
        finished = self._ending(running, columns) if over else None
        if over:
            self._retire(running)
        if not columns["tokens"] and not finished:
            return None
        given = dict(columns, logprobs=columns["logprobs"] if running.request.logprobs else None)
        return Event(running.id, finished=finished, **given)

    def _ending(self, running: Running, columns: Mapping[str, list]) -> str:
        tokens = columns["tokens"]
        if tokens and tokens[-1] in running.request.stops:
            return "stop"
        whole = running.sent >= len(running.request.prompt) + running.request.max_new_tokens
        return "length" if whole else "gave up"

    def _retire(self, running: Running) -> None:
        del self._running[running.id]
        self.lodging.give_back(running.guest)


def _check(program: Program, config: EngineConfig, models: int) -> None:
    check_program(program)
    if models != program.models:
        name = type(program).__name__
        raise UserError(f"models: got {models}, expected {program.models}: {name} routes between that many")
    if config.pages is not None and len(config.pages) != models:
        raise UserError(f"pages: got {len(config.pages)}, expected {models}, one for each model")
