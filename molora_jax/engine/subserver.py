"""One model on a device of its own: it runs the requests whose turn it is, and hands them on to where they go next.

Requests keep their slot and their KV in every subserver for their whole life; one whose turn it is elsewhere is pending
here. When it comes back, it brings the tokens that others have written in between, which its next run reads.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

from molora_jax.config import UserError
from molora_jax.engine import fused, policy, timing
from molora_jax.engine import look as programs
from molora_jax.engine.blueprint import Blueprint, Model
from molora_jax.engine.fused import Schedule
from molora_jax.engine.handover import Parcel, Standing, columns, cut, receive, rolled, unrolled, window
from molora_jax.engine.housing import Housing
from molora_jax.engine.journey import among
from molora_jax.engine.look import Seen
from molora_jax.engine.messages import FRONT, Entrance, Kind, Message, News
from molora_jax.engine.run import Weights
from molora_jax.engine.table import without_drafts
from molora_jax.engine.timing import Load, Times
from molora_jax.routing.program import undeclared
from molora_jax.typing import Bool, Float, Int, Params

NOBODY = -1
"""Number of the request in a free slot."""


Post = tuple[int, Message]
"""A message and who gets it: a model's index, or `FRONT`."""


class Subserver:
    """Takes in messages by `handle`, and runs its model by `run` once its `patience` is over, in whatever thread.

    What the device needs to know of slots is kept on the host as well, as arrays of S.
    """

    def __init__(self, index: int, blueprint: Blueprint, model: Model, params: Params, device: jax.Device):
        """`params` are the program's."""
        self.index, self.blueprint, self.config = index, blueprint, blueprint.config
        self.plan = fused.alone(blueprint.plan(), index)
        put = functools.partial(jax.device_put, device=device)
        own = lambda value: tuple(value if i == index else None for i in range(len(blueprint.fleet.cfgs)))
        self._weights = put(Weights(own(model.params), own(model.adapters), params))
        with jax.default_device(device):
            self._memory = put(blueprint.memory(index))
            self._table = put(blueprint.table(blueprint.departures(params)))
        slots = self.config.max_rows
        self.schedule = fused.eager(self.plan)
        self._numbers = np.full(slots, NOBODY, np.int32)
        self._told = np.zeros(slots, np.int32)
        self._since = np.zeros(slots)  # when each began to wait here
        self._prompt = np.zeros(slots, np.int32)  # its length in each
        self.housing = Housing(blueprint.pages[index], slots, self._memory.tables.shape[2])
        self.ahead = 0  # tokens of prompts that were read ahead of their turn
        self._batch = np.zeros(slots, bool)  # those for whom a run was launched, in parts, of which some are to come
        self._standing: Standing = jax.tree.map(np.array, jax.device_get(Standing.of(self._table)))

    @property
    def width(self) -> int:
        """Tokens of each slot that a look shows."""
        return min(2 * self.plan.steps + self.blueprint.fleet.program.draft, self.config.max_length)

    def warm_up(self) -> None:
        """Compiles everything."""
        names = ["_enter", "_receive", "_window", "_knobs", "_house"]
        names += ["_look"] * bool(self.plan.runs) + ["_shadow"] * bool(self.plan.runs and self.blueprint.shadow)
        names += ["_get_drafts", "_set_drafts"] * (self._table.journey.drafts is not None)
        for name in names:
            getattr(self, name)

    def handle(self, message: Message) -> None:
        """Takes in one message of the kinds that subservers and the front end send to a subserver."""
        handlers = {Kind.ENTER: self._on_enter, Kind.STOP: self._on_stop, Kind.HAND: self._on_hand}
        handlers |= {Kind.KNOBS: self._on_knobs, Kind.SCHEDULE: self._on_schedule}
        handlers[message.kind](message.payload)

    def _on_enter(self, entrance: Entrance) -> None:
        slot, row = int(entrance.slot), entrance.row
        self._memory, self._table = self._enter(self._memory, self._table, entrance.slot, row)
        self.housing.enter(slot, int(entrance.size))
        self._prompt[slot] = row.length
        self._numbers[slot], self._told[slot], self._since[slot] = entrance.number, row.length, time.monotonic()
        self._stand(slot, Standing.of(row))

    def _on_stop(self, ended: tuple[np.ndarray, np.ndarray]) -> None:
        numbers, slots = ended
        self._vacate(slots[self._numbers[slots] == numbers])

    def _vacate(self, slots: Int[np.ndarray, "k"]) -> None:
        """Frees the slots of requests that have ended."""
        self._standing.active[slots], self._numbers[slots] = False, NOBODY
        for slot in slots.tolist():
            self.housing.leave(slot)

    def _on_knobs(self, turned: tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]) -> None:
        self._table = self._knobs(self._table, *turned)

    def _on_schedule(self, schedule: Schedule) -> None:
        """`schedule` is that of the whole plan."""
        own = fused.part(self.blueprint.plan(), self.index)
        self.schedule = dataclasses.replace(schedule, seconds=schedule.seconds[own])

    def _on_hand(self, parcel: Parcel) -> None:
        known = self._numbers[parcel.slot] == parcel.number  # others were aborted on their way
        parcel = jax.tree.map(lambda leaf: leaf[known], parcel)
        if not len(parcel.slot):
            return
        parcel = self._remembered(parcel)
        slots, count = self._padded(parcel.slot, NOBODY), self._padded(parcel.count)
        standing = jax.tree.map(self._padded, parcel.standing)
        for at in range(0, max(int(parcel.count.max()), 1), self.width):
            given = {name: self._piece(column, at) for name, column in parcel.columns.items()}
            rest = np.clip(count - at, 0, self.width)
            self._table = self._receive(self._table, slots, self._padded(parcel.start) + at, rest, standing, given)
        holds = parcel.standing.turn.hold
        for slot, length, hold, rows in zip(parcel.slot, parcel.standing.length, holds, parcel.drafts, strict=True):
            if len(rows) and hold:
                drafts = unrolled(rows[-hold:], length, self.blueprint.fleet.program.draft)
                self._table = self._set_drafts(self._table, slot, drafts)
        self._told[parcel.slot], self._since[parcel.slot] = parcel.told, time.monotonic()
        self._stand(parcel.slot, parcel.standing)

    def _remembered(self, parcel: Parcel) -> Parcel:
        """With what this model has read, which may be more than the sender knows, or less, if it lost its pages.

        What it had read at its last turn the sender knows, as far as it has not been taken back; so that is still true,
        and the prompt always is.
        """
        anchor = np.array(parcel.standing.anchor)
        true = np.maximum(anchor[:, self.index], self._prompt[parcel.slot])
        anchor[:, self.index] = np.minimum(self._standing.anchor[parcel.slot, self.index], true)
        return dataclasses.replace(parcel, standing=dataclasses.replace(parcel.standing, anchor=anchor))

    def _stand(self, slots, standing: Standing) -> None:
        """Notes where requests stand."""
        jax.tree.map(lambda leaf, value: leaf.__setitem__(slots, value), self._standing, standing)

    def _padded(self, leaf: np.ndarray, fill=0) -> np.ndarray:
        """One row a slot of the table."""
        padded = np.full((self.config.max_rows, *leaf.shape[1:]), fill, leaf.dtype)
        padded[: len(leaf)] = leaf
        return padded

    def _piece(self, column: np.ndarray, at: int) -> np.ndarray:
        piece = column[:, at : at + self.width]
        padded = np.zeros((self.config.max_rows, self.width, *column.shape[2:]), column.dtype)
        padded[: len(piece), : piece.shape[1]] = piece
        return padded

    @property
    def _here(self) -> Bool[np.ndarray, "S"]:
        """Slots whose request is to be run here."""
        return self._standing.active & (self._standing.turn.model == self.index)

    @property
    def _housed(self) -> Bool[np.ndarray, "S"]:
        return np.array([self.housing.housed(slot) for slot in range(self.config.max_rows)])

    def _make_room(self) -> None:
        """Finds pages for those who are to be run here, the oldest first."""
        order = np.argsort(self._numbers, kind="stable")
        here, there = self._here[order], self._standing.active[order]
        for slot in self.housing.make_room(order[here].tolist(), order[there & ~here].tolist()):
            self._settle(slot)

    def _settle(self, slot: int) -> None:
        """Lets the device know which pages a request has; what was in those it lost is to be read again."""
        housed = self.housing.housed(slot)
        if not housed:
            self._standing.anchor[slot, self.index] = 0
        args = np.int32(slot), np.bool_(housed), self.housing.table(slot)
        self._memory, self._table = self._house(self._memory, self._table, *args)

    def waiting(self) -> tuple[Bool[np.ndarray, "q"], Float[np.ndarray, "q"]]:
        """Of each run of this model: whether it is to be run now, and how long the oldest has waited for it, or -1."""
        turn, here, waited = self._standing.turn, self._here & self._housed, time.monotonic() - self._since
        waits = np.stack([here & (turn.mode == run.mode) for run in self.plan.runs])
        oldest = np.max(np.where(waits, waited, -1.0), axis=1)
        thresholds = policy.clamp(np.asarray(self._patience.thresholds), np.sum(self._standing.active))
        own = thresholds[list(self.plan.own)]
        every = np.arange(len(own))
        return policy.ready(every, np.sum(waits, axis=1), oldest, own, self.schedule.max_wait), oldest

    @property
    def _patience(self) -> Schedule:
        """The schedule, without thresholds where some who are here wait for the pages of others, who must go on."""
        if not np.any(self._here & ~self._housed):
            return self.schedule
        return dataclasses.replace(self.schedule, thresholds=np.ones_like(self.schedule.thresholds))

    @property
    def _unread(self) -> Int[np.ndarray, "k"]:
        """Slots of requests elsewhere whose prompts may be read ahead, the oldest first: there is room for them."""
        if not self.blueprint.shadow:
            return np.zeros(0, np.int32)
        order = np.argsort(self._numbers, kind="stable").astype(np.int32)
        behind = self._standing.active & ~self._here & (self._standing.anchor[:, self.index] < self._prompt)
        return np.array([slot for slot in order[behind[order]] if self.housing.roomy(int(slot))], np.int32)

    def patience(self) -> float | None:
        """Seconds after which `run` is worth a try, if no message comes; None: never."""
        if not self.plan.runs:
            return None
        self._make_room()
        ready, oldest = self.waiting()
        if ready.any() or (self._batch & self._here).any() or self._unread.size:
            return 0.0
        if not np.isfinite(self.schedule.max_wait) or oldest.max() < 0:
            return None
        return max(float(self.schedule.max_wait - oldest.max()), 0.0)

    def run(self) -> list[Post]:
        """Runs the model once; more often as long as no request is anywhere else, which could come to join them.

        Returns:
          What is to be said to whom, in this order: the front end learns of tokens before anybody can add to them.
        """
        if not self.waiting()[0].any() and not (self._batch & self._here).any():
            self._read_ahead()
            return []
        begun, mine, before = time.monotonic(), np.flatnonzero(self._here).astype(np.int32), self._standing.runs.copy()
        steps = 1 if (self._standing.active & ~self._here).any() else self.plan.steps
        waited = (begun - self._since).astype(np.float32)
        args = self._memory, self._table, self._told, waited, self._standing.active, self._batch, np.int32(steps)
        self._memory, self._table, seen = self._look(self._weights, self._patience, *args, np.int32(fused.NONE))
        seen: Seen = jax.device_get(seen)
        if not seen.counts.runs.any():
            return []
        now, self._batch = time.monotonic(), seen.batch
        self._stand(mine, jax.tree.map(lambda leaf: leaf[mine], seen.standing))
        self._since[mine] = np.where(seen.standing.runs[mine] > before[mine], now, self._since[mine])
        return list(self._posts(mine, seen, now - begun))

    def _read_ahead(self) -> None:
        """Reads prompts of requests that may come here, as far as one bucket goes."""
        rows = np.full(self.config.max_rows, NOBODY, np.int32)
        for n, slot in enumerate(self._unread.tolist()):
            if self.housing.house(slot):
                self._settle(slot)
                rows[n] = slot
        there = rows[rows >= 0]
        rows = np.concatenate([there, np.full(len(rows) - len(there), NOBODY, np.int32)])
        self._memory, self._table, anchor = self._shadow(self._weights, self._memory, self._table, rows)
        anchor = np.asarray(anchor)[there]
        self.ahead += int(np.sum(anchor - self._standing.anchor[there, self.index]))
        self._standing.anchor[there, self.index] = anchor

    def time(self, context: int, repeats: int) -> Times:
        """Measures this model's choices, while there is no request anywhere."""
        slots, prompt = self.config.max_rows, min(context, self.config.max_length - 1)
        for slot in range(slots):
            self.housing.enter(slot, -(-prompt // self.config.page_size))
            self.housing.house(slot)
            self._settle(slot)
        measured = timing.measure(self.plan, functools.partial(self._timed, prompt), prompt, repeats)
        for slot in range(slots):
            self.housing.leave(slot)
            self._settle(slot)
        return measured

    def _timed(self, context: int, choice: int, load: Load) -> float:
        table = jax.block_until_ready(timing.loaded(self._table, context, load, self.config.max_length))
        nothing = np.zeros(self.config.max_rows, np.float32)
        args = self._told, nothing, np.asarray(table.active), nothing.astype(bool)
        begun = time.perf_counter()
        args = *args, np.int32(choice != fused.NONE), np.int32(choice)
        self._memory, self._table, seen = self._look(self._weights, self.schedule, self._memory, table, *args)
        jax.device_get(seen)
        return time.perf_counter() - begun

    def _posts(self, mine: Int[np.ndarray, "k"], seen: Seen, seconds: float) -> Iterator[Post]:
        at = jax.tree.map(lambda leaf: leaf[mine], seen.standing)
        program = self.blueprint.fleet.program
        if np.any(at.active & ~among(at.turn, program.runs)):
            raise UserError(undeclared(program))
        models, to, over = len(self.blueprint.fleet.cfgs), at.turn.model, ~at.active
        goes = ~over & (to != self.index)
        final, told, known = at.length - at.turn.hold, self._told[mine], seen.known[mine]
        starts = np.minimum(told, known)
        columns = self._columns(mine, seen.shown, starts, np.where(goes, at.length, final) - starts)
        numbers, self._told[mine] = self._numbers[mine], final
        if over.any():
            ended = Message(Kind.STOP, (numbers[over], mine[over]))
            yield from ((other, ended) for other in range(models) if other != self.index)
            self._vacate(mine[over])
        fresh = np.flatnonzero(over | (final > told))
        count = (final - told)[fresh]
        values = cut({name: column[fresh] for name, column in columns.items()}, (told - starts)[fresh], count)
        news = News(numbers[fresh], count, over[fresh], values, seen.counts, np.float64(seconds))
        yield FRONT, Message(Kind.NEWS, (np.int32(self.index), news))
        for other in np.unique(to[goes]):
            rows = np.flatnonzero(goes & (to == other))
            standing = jax.tree.map(lambda leaf, rows=rows: leaf[rows], at)
            start, count = known[rows], standing.length - known[rows]
            sent = cut({name: column[rows] for name, column in columns.items()}, start - starts[rows], count)
            who = numbers[rows], mine[rows], final[rows]
            yield (
                int(other),
                Message(Kind.HAND, Parcel(*who, start, count, standing, sent, self._drafts(who[1], standing))),
            )

    def _columns(self, slots, shown: dict[str, np.ndarray], starts, count) -> dict[str, np.ndarray]:
        """`count` values of some slots' columns from `starts` on; a look shows the first, and as a rule all."""
        parts = [shown]
        while len(parts) * self.width < np.max(count, initial=0):
            at = np.zeros(self.config.max_rows, np.int32)
            at[slots] = starts + len(parts) * self.width
            parts.append(jax.device_get(self._window(self._table, at)))
        return {name: np.concatenate([part[name][slots] for part in parts], axis=1) for name in shown}

    def _drafts(self, slots: Int[np.ndarray, "k"], standing: Standing) -> Float[np.ndarray, "k h V"]:
        kept, most = self._table.journey.drafts, int(standing.turn.hold.max())
        if kept is None or not most:
            return np.zeros((len(slots), 0, 0), np.float32)
        drafts = np.zeros((len(slots), most, kept.shape[2]), kept.dtype)
        for rows, slot, length, hold in zip(drafts, slots, standing.length, standing.turn.hold, strict=True):
            if hold:
                rows[most - hold :] = rolled(np.asarray(self._get_drafts(self._table, np.int32(slot))), length, hold)
        return drafts

    def _compiled(self, function: Callable, *args, donate: tuple[int, ...] = ()) -> jax.stages.Compiled:
        return jax.jit(function, donate_argnums=donate).lower(*args).compile()

    @functools.cached_property
    def _look(self) -> jax.stages.Compiled:
        slots = self.config.max_rows
        args = self._told, np.zeros(slots, np.float32), self._batch, self._batch, np.int32(0), np.int32(0)
        args = self._weights, self.schedule, self._memory, self._table, *args
        return self._compiled(functools.partial(programs.look, self.plan, self.index, self.width), *args, donate=(2, 3))

    @functools.cached_property
    def _enter(self) -> jax.stages.Compiled:
        blank = lambda leaf: np.zeros(leaf.shape[1:], leaf.dtype)
        row = jax.tree.map(blank, without_drafts(self._table))
        return self._compiled(programs.admit, self._memory, self._table, np.int32(0), row, donate=(0, 1))

    @functools.cached_property
    def _house(self) -> jax.stages.Compiled:
        args = self._memory, self._table, np.int32(0), np.bool_(False), self.housing.table(0)
        return self._compiled(functools.partial(programs.house, self.index), *args, donate=(0, 1))

    @functools.cached_property
    def _shadow(self) -> jax.stages.Compiled:
        args = self._weights, self._memory, self._table, np.zeros(self.config.max_rows, np.int32)
        return self._compiled(functools.partial(programs.shadow, self.plan, self.index), *args, donate=(1, 2))

    @functools.cached_property
    def _receive(self) -> jax.stages.Compiled:
        row = np.zeros(self.config.max_rows, np.int32)
        wide = lambda leaf: np.zeros((len(row), self.width), leaf.dtype)
        given = jax.tree.map(wide, columns(self._table))
        return self._compiled(receive, self._table, row, row, row, self._standing, given, donate=(0,))

    @functools.cached_property
    def _window(self) -> jax.stages.Compiled:
        show = functools.partial(window, width=self.width)
        return self._compiled(show, self._table, np.zeros(self.config.max_rows, np.int32))

    @functools.cached_property
    def _knobs(self) -> jax.stages.Compiled:
        knobs = self._table.journey.knobs
        values, changed = ({name: np.zeros((), kind) for name in knobs} for kind in (np.float32, bool))
        return self._compiled(programs.set_knobs, self._table, np.int32(0), values, changed, donate=(0,))

    @functools.cached_property
    def _get_drafts(self) -> jax.stages.Compiled:
        return self._compiled(lambda table, slot: table.journey.drafts[slot], self._table, np.int32(0))

    @functools.cached_property
    def _set_drafts(self) -> jax.stages.Compiled:
        drafts = self._table.journey.drafts
        rows = np.zeros(drafts.shape[1:], drafts.dtype)
        return self._compiled(programs.set_drafts, self._table, np.int32(0), rows, donate=(0,))
