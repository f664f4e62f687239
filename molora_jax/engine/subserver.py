"""One model on a device of its own: it runs the requests whose turn it is, and hands them on to where they go next.

Requests keep their slot and their KV in every subserver for their whole life; one whose turn it is elsewhere is pending
here. When it comes back, it brings the tokens that others have written in between, which its next run reads.
"""

import dataclasses
import functools
import queue
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.engine import fused, policy
from molora_jax.engine.blueprint import Blueprint, Model
from molora_jax.engine.fused import Counts, Plan, Schedule, super_step
from molora_jax.engine.handover import Parcel, Standing, columns, cut, known, receive, rolled, unrolled, window
from molora_jax.engine.messages import FRONT, Entrance, Kind, Message, News
from molora_jax.engine.run import Weights
from molora_jax.engine.table import Entry, Memory, RequestTable, enter, without_drafts
from molora_jax.typing import Array, Bool, Float, Int, Params

NOBODY = -1
"""Number of the request in a free slot."""


class Inbox(Protocol):
    """A queue of messages; raises `queue.Empty` as `queue.SimpleQueue` does."""

    def get(self, timeout: float | None = None) -> Message: ...

    def get_nowait(self) -> Message: ...


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
        self._batch = np.zeros(slots, bool)  # those for whom a run was launched, in parts, of which some are to come
        self._standing: Standing = jax.tree.map(np.array, jax.device_get(Standing.of(self._table)))

    @property
    def width(self) -> int:
        """Tokens of each slot that a look shows."""
        return min(2 * self.plan.steps + self.blueprint.fleet.program.draft, self.config.max_length)

    def warm_up(self) -> None:
        """Compiles everything."""
        programs = ["_enter", "_receive", "_window", "_knobs"]
        programs += ["_look"] * bool(self.plan.runs)
        programs += ["_get_drafts", "_set_drafts"] * (self._table.journey.drafts is not None)
        for program in programs:
            getattr(self, program)

    def handle(self, message: Message) -> None:
        """Takes in one message of the kinds that subservers and the front end send to a subserver."""
        handlers = {Kind.ENTER: self._on_enter, Kind.STOP: self._on_stop, Kind.HAND: self._on_hand}
        handlers |= {Kind.KNOBS: self._on_knobs, Kind.SCHEDULE: self._on_schedule}
        handlers[message.kind](message.payload)

    def _on_enter(self, entrance: Entrance) -> None:
        slot, row = int(entrance.slot), entrance.row
        args = self._memory, self._table, entrance.slot, row, entrance.pages
        self._memory, self._table = self._enter(*args)
        self._numbers[slot], self._told[slot], self._since[slot] = entrance.number, row.length, time.monotonic()
        self._stand(slot, Standing.of(row))

    def _on_stop(self, ended: tuple[np.ndarray, np.ndarray]) -> None:
        numbers, slots = ended
        here = slots[self._numbers[slots] == numbers]
        self._standing.active[here], self._numbers[here] = False, NOBODY

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

    def waiting(self) -> tuple[Bool[np.ndarray, "q"], Float[np.ndarray, "q"]]:
        """Of each run of this model: whether it is to be run now, and how long the oldest has waited for it, or -1."""
        turn, here, waited = self._standing.turn, self._here, time.monotonic() - self._since
        waits = np.stack([here & (turn.mode == run.mode) for run in self.plan.runs])
        oldest = np.max(np.where(waits, waited, -1.0), axis=1)
        thresholds = policy.clamp(np.asarray(self.schedule.thresholds), np.sum(self._standing.active))
        own = thresholds[list(self.plan.own)]
        every = np.arange(len(own))
        return policy.ready(every, np.sum(waits, axis=1), oldest, own, self.schedule.max_wait), oldest

    def patience(self) -> float | None:
        """Seconds after which `run` is worth a try, if no message comes; None: never."""
        if not self.plan.runs:
            return None
        ready, oldest = self.waiting()
        if ready.any() or (self._batch & self._here).any():
            return 0.0
        if not np.isfinite(self.schedule.max_wait) or oldest.max() < 0:
            return None
        return max(float(self.schedule.max_wait - oldest.max()), 0.0)

    def run(self) -> list[Post]:
        """Runs the model once; more often as long as no request is anywhere else, which could come to join them.

        Returns:
          What is to be said to whom, in this order: the front end learns of tokens before anybody can add to them.
        """
        begun, mine, before = time.monotonic(), np.flatnonzero(self._here).astype(np.int32), self._standing.runs.copy()
        steps = 1 if (self._standing.active & ~self._here).any() else self.plan.steps
        waited = (begun - self._since).astype(np.float32)
        args = self._memory, self._table, self._told, waited, self._standing.active, self._batch, np.int32(steps)
        self._memory, self._table, seen = self._look(self._weights, self.schedule, *args)
        seen: _Seen = jax.device_get(seen)
        if not seen.counts.runs.any():
            return []
        now, self._batch = time.monotonic(), seen.batch
        self._stand(mine, jax.tree.map(lambda leaf: leaf[mine], seen.standing))
        self._since[mine] = np.where(seen.standing.runs[mine] > before[mine], now, self._since[mine])
        return list(self._posts(mine, seen, now - begun))

    def _posts(self, mine: Int[np.ndarray, "k"], seen: "_Seen", seconds: float) -> Iterator[Post]:
        at = jax.tree.map(lambda leaf: leaf[mine], seen.standing)
        models, to, over = len(self.blueprint.fleet.cfgs), at.turn.model, ~at.active
        goes = ~over & (to != self.index)
        final, told, known = at.length - at.turn.hold, self._told[mine], seen.known[mine]
        starts = np.minimum(told, known)
        columns = self._columns(mine, seen.shown, starts, np.where(goes, at.length, final) - starts)
        numbers, self._told[mine] = self._numbers[mine], final
        if over.any():
            ended = Message(Kind.STOP, (numbers[over], mine[over]))
            yield from ((other, ended) for other in range(models) if other != self.index)
            self._numbers[mine[over]] = NOBODY
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
        args = self._told, np.zeros(slots, np.float32), self._batch, self._batch, np.int32(0)
        args = self._weights, self.schedule, self._memory, self._table, *args
        return self._compiled(functools.partial(_look, self.plan, self.index, self.width), *args, donate=(2, 3))

    @functools.cached_property
    def _enter(self) -> jax.stages.Compiled:
        blank = lambda leaf: np.zeros(leaf.shape[1:], leaf.dtype)
        row, pages = jax.tree.map(blank, without_drafts(self._table)), self._memory.tables[0, 0]
        args = self._memory, self._table, np.int32(0), row, np.zeros(pages.shape, pages.dtype)
        return self._compiled(_enter, *args, donate=(0, 1))

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
        return self._compiled(_knobs, self._table, np.int32(0), values, changed, donate=(0,))

    @functools.cached_property
    def _get_drafts(self) -> jax.stages.Compiled:
        return self._compiled(lambda table, slot: table.journey.drafts[slot], self._table, np.int32(0))

    @functools.cached_property
    def _set_drafts(self) -> jax.stages.Compiled:
        drafts = self._table.journey.drafts
        rows = np.zeros(drafts.shape[1:], drafts.dtype)
        return self._compiled(_set_drafts, self._table, np.int32(0), rows, donate=(0,))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Seen:
    """What the host learns from one look: `shown` are the columns from the told or the `known` tokens on: [S W].

    `batch` are those who come next, whoever waits by then.
    """

    standing: Standing
    known: Int[Array, "S"]
    shown: dict[str, Array]
    counts: Counts
    batch: Bool[Array, "S"]


def _look(
    plan: Plan,
    index: int,
    width: int,
    weights: Weights,
    schedule: Schedule,
    memory: Memory,
    table: RequestTable,
    told: Int[Array, "S"],
    waited: Float[Array, "S"],
    active: Bool[Array, "S"],
    batch: Bool[Array, "S"],
    steps: Int[Array, ""],
) -> tuple[Memory, RequestTable, _Seen]:
    """Up to `steps` runs of model `index`, and what the host has to know after them."""
    journey = dataclasses.replace(table.journey, waited=waited)
    table = dataclasses.replace(table, active=active, journey=journey)
    memories = tuple(memory if i == index else None for i in range(len(plan.fleet.cfgs)))
    leave, forced = jnp.bool_(True), jnp.int32(fused.NONE)
    args = weights, schedule, memories, table, steps, leave, forced, batch
    memories, table, counts, batch = super_step(plan, *args)
    has = known(table)
    seen = _Seen(Standing.of(table), has, window(table, jnp.minimum(told, has), width), counts, batch)
    return memories[index], table, seen


def _enter(memory: Memory, table: RequestTable, slot, row: RequestTable, pages) -> tuple[Memory, RequestTable]:
    drafts = table.journey.drafts
    (memory,), table = enter((memory,), without_drafts(table), slot, Entry(row, (pages,)))
    return memory, dataclasses.replace(table, journey=dataclasses.replace(table.journey, drafts=drafts))


def _set_drafts(table: RequestTable, slot: Int[Array, ""], rows: Float[Array, "K V"]) -> RequestTable:
    journey = dataclasses.replace(table.journey, drafts=table.journey.drafts.at[slot].set(rows))
    return dataclasses.replace(table, journey=journey)


def _knobs(table: RequestTable, slot: Int[Array, ""], values: dict[str, Array], changed: dict[str, Array]):
    put = lambda leaf, value, new: leaf.at[slot].set(jnp.where(new, value, leaf[slot]))
    knobs = jax.tree.map(put, table.journey.knobs, values, changed)
    return dataclasses.replace(table, journey=dataclasses.replace(table.journey, knobs=knobs))


def serve(subserver: Subserver, inbox: Inbox, post: Callable[[int, Message], None]) -> None:
    """The loop of a thread or process: messages are taken in between runs, until one says to close."""
    patience: float | None = 0.0
    while True:
        for message in taken(inbox, patience):
            if message.kind == Kind.CLOSE:
                return
            subserver.handle(message)
        patience = subserver.patience()
        if patience == 0:
            for to, message in subserver.run():
                post(to, message)


def taken(inbox: Inbox, timeout: float | None) -> Iterator[Message]:
    """The messages that are there; the first is waited for."""
    try:
        yield inbox.get(timeout=timeout)
        while True:
            yield inbox.get_nowait()
    except queue.Empty:
        return
