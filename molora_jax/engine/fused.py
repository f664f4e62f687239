"""Several models, their policy and the routing program as one device program: many runs without a look of the host.

Each turn of the outer loop lets the policy pick a run, and the requests and the bucket it takes. The choice is a chain
of inner loops of no or one trip: a conditional would copy every KV table on some backends.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.engine import policy
from molora_jax.engine.buckets import Bucket
from molora_jax.engine.journey import among, at
from molora_jax.engine.run import Fleet, Weights, perform, unread
from molora_jax.engine.table import Memory, RequestTable
from molora_jax.nn.layout import NOWHERE
from molora_jax.routing.program import Mode, Run
from molora_jax.typing import Array, Bool, Float, Int

NONE = -1
"""No choice is left to be run."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compiled; static.

    Attributes:
      fleet: the models and their program.
      choices: the runs there are, each in each of its buckets; a run's buckets stand together, by rows, then tokens.
      steps: most runs between two looks of the host.
      patient: whether to wait for thresholds although nobody else is ready: other devices may bring more requests.
    """

    fleet: Fleet
    choices: tuple[tuple[Run, Bucket], ...]
    steps: int
    patient: bool = False

    @property
    def runs(self) -> tuple[Run, ...]:
        """Those that are run here, in the order of the program's."""
        return tuple(dict.fromkeys(run for run, _ in self.choices))

    @property
    def known(self) -> tuple[Run, ...]:
        """All that the program may ask for, on whatever device."""
        return self.fleet.program.runs

    @property
    def own(self) -> tuple[int, ...]:
        """Where those that are run here stand among them."""
        return tuple(self.known.index(run) for run in self.runs)

    def buckets(self, run: Run) -> tuple[Bucket, ...]:
        return tuple(bucket for each, bucket in self.choices if each == run)

    def first(self, run: Run) -> int:
        """Index of the run's first choice."""
        return [each for each, _ in self.choices].index(run)


def plan(fleet: Fleet, max_rows: int, chunk: int, steps: int) -> Plan:
    """The buckets of every run: for one token a row, of few rows and of all; and for suffixes, short and long.

    A run that always reads several tokens a row, as VERIFY does, has none of the first.
    """
    few = min(max(max_rows // 4, 4), max_rows)
    choices = []
    for run in fleet.program.runs:
        single = run.mode in (Mode.DECODE, Mode.FUSE)
        shapes = [(few, few), (max_rows, max_rows)] if single else []
        least = max(4 * max_rows, 16, longest(fleet, run))
        shapes += [(max_rows, least), (max_rows, max(chunk, least))]
        choices += [(run, Bucket(rows, tokens, _tile(rows, tokens), 1)) for rows, tokens in dict.fromkeys(shapes)]
    return Plan(fleet, tuple(choices), steps)


def part(plan: Plan, model: int) -> list[int]:
    """Which choices are one model's."""
    return [i for i, (run, _) in enumerate(plan.choices) if run.model == model]


def alone(plan: Plan, model: int) -> Plan:
    """One model's part of a plan, for a device of its own."""
    choices = tuple(plan.choices[i] for i in part(plan, model))
    return dataclasses.replace(plan, choices=choices, patient=True)


def _tile(rows: int, tokens: int) -> int:
    """Tokens of a row that attend together: about as many as a row has."""
    return min(-(-tokens // rows), 16)


def longest(fleet: Fleet, run: Run) -> int:
    """Tokens that a run must be able to read of one request at once."""
    return fleet.program.draft + 1 + len(fleet.tail(run))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the policy decides; may change from call to call. Q runs that the program knows, P choices.

    Attributes:
      thresholds: B of each run (`engine.policy`), wherever it is run.
      max_wait: modelled seconds after which a run waits no longer for its threshold.
      seconds: that each choice takes, and so many more for each row and token that it reads (`engine.timing`).
    """

    thresholds: Int[Array, "Q"]
    max_wait: Float[Array, ""]
    seconds: Float[Array, "P 3"]


def eager(plan: Plan) -> Schedule:
    """Nobody waits, and every choice takes as long as it has room for tokens, until it is measured."""
    return Schedule(np.ones(len(plan.known), np.int32), np.float32(np.inf), level([b.tokens for _, b in plan.choices]))


def level(seconds: Sequence[float]) -> Float[np.ndarray, "P 3"]:
    """Step times that are the same however full a bucket is."""
    return np.pad(np.asarray(seconds, np.float32)[:, None], ((0, 0), (0, 2)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts:
    """What has been done.

    Attributes:
      runs: times that each choice was run.
      rows, read: requests and tokens in all of them together, padding apart.
      moves: requests that went from one run to another: [from, to], the last column those that ended.
      commits: tokens that they were given on the way; negative where some were taken back.
    """

    runs: Int[Array, "P"]
    rows: Int[Array, "P"]
    read: Int[Array, "P"]
    moves: Int[Array, "Q Q+1"]
    commits: Int[Array, "Q Q+1"]

    @classmethod
    def zero(cls, plan: Plan) -> "Counts":
        P, Q = len(plan.choices), len(plan.known)
        zeros = lambda *shape: jnp.zeros(shape, jnp.int32)
        return cls(zeros(P), zeros(P), zeros(P), zeros(Q, Q + 1), zeros(Q, Q + 1))


@dataclasses.dataclass(frozen=True)
class ModelUsage:
    """What one model has done.

    Attributes:
      runs: times that it ran.
      rows, read: requests and tokens in all of them together.
      padding: tokens that its buckets had room for, over those read.
    """

    runs: int
    rows: int
    read: int
    padding: float

    @classmethod
    def of(cls, plan: Plan, counts: Counts, model: int) -> "ModelUsage":
        own = [i for i, (run, _) in enumerate(plan.choices) if run.model == model]
        room = sum(int(counts.runs[i]) * plan.choices[i][1].tokens for i in own)
        runs, rows, read = (int(column[own].sum()) for column in (counts.runs, counts.rows, counts.read))
        return cls(runs, rows, read, room / max(read, 1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Loop:
    """Carry of the outer loop; `choice` is what is to be run now, or `NONE`, for `rows` out of `batch`.

    `left` are those of the last batch who were not served yet: it goes on with them, or, if there are none, anew.
    """

    step: Int[Array, ""]
    choice: Int[Array, ""]
    rows: Int[Array, "S"]
    batch: Bool[Array, "S"]
    left: Bool[Array, "S"]
    memories: tuple[Memory, ...]
    table: RequestTable
    counts: Counts


def super_step(
    plan: Plan,
    weights: Weights,
    schedule: Schedule,
    memories: tuple[Memory, ...],
    table: RequestTable,
    steps: Int[Array, ""],
    leave: Bool[Array, ""],
    forced: Int[Array, ""],
    batch: Bool[Array, "S"],
) -> tuple[tuple[Memory, ...], RequestTable, Counts, Bool[Array, "S"]]:
    """Up to `steps` runs of whichever models the policy picks.

    Returns early when nobody is to be run, or, if `leave`, as soon as a request has ended or gone to a model that is
    not run here: others wait for its slot, or it for them. A `forced` choice other than `NONE` is the first, whatever
    the policy says, with the first slots: to time it.

    Args:
      batch: slots that an earlier call has launched a run for, and not served yet.

    Returns:
      The memories and the table, what was done, and the batch that is left.
    """
    begun = waiting(plan, table)

    def go_on(loop: _Loop) -> Bool[Array, ""]:
        return (loop.choice != NONE) & (loop.step < steps) & ~(leave & jnp.any(begun & ~waiting(plan, loop.table)))

    def step(loop: _Loop) -> _Loop:
        for index in range(len(plan.choices)):
            here = lambda loop, index=index: loop.choice == index
            run = functools.partial(_once, plan, weights, schedule, index)
            loop = jax.lax.while_loop(here, run, loop)
        choice, rows, batch = choose(plan, schedule, loop.table, loop.batch)
        return dataclasses.replace(loop, step=loop.step + 1, choice=choice, rows=rows, batch=batch, left=loop.batch)

    left = batch
    choice, rows, batch = choose(plan, schedule, table, left)
    rows = jnp.where(forced == NONE, rows, jnp.arange(rows.shape[0], dtype=jnp.int32))
    choice = jnp.where(forced == NONE, choice, forced)
    loop = _Loop(jnp.int32(0), choice, rows, batch, left, memories, table, Counts.zero(plan))
    loop = jax.lax.while_loop(go_on, step, loop)
    return loop.memories, loop.table, loop.counts, loop.left & waiting(plan, loop.table)


def waiting(plan: Plan, table: RequestTable) -> Bool[Array, "S"]:
    """Which slots have a request that is to be run here."""
    return table.active & among(table.journey.turn, plan.runs)


def choose(
    plan: Plan, schedule: Schedule, table: RequestTable, batch: Bool[Array, "S"]
) -> tuple[Int[Array, ""], Int[Array, "S"], Bool[Array, "S"]]:
    """What to run next: a choice, the slots that it takes, the longest waiting first, and the batch they belong to.

    The policy launches a run for all who wait for it; that `batch` is served first, in as many parts as are quickest.
    """
    waits = jnp.stack([table.active & at(table.journey.turn, run) & _lodged(plan, run, table) for run in plan.runs])
    waited = table.journey.waited
    oldest = jnp.max(jnp.where(waits, waited, 0), axis=1)
    thresholds = policy.clamp(schedule.thresholds, jnp.sum(table.active))[jnp.array(plan.own)]
    count = jnp.sum(waits, axis=1)
    if plan.patient:
        ready = policy.ready(jnp.arange(len(plan.runs)), count, oldest, thresholds, schedule.max_wait)
        count = jnp.where(ready, count, 0)
    picked = policy.pick(count, oldest, thresholds, schedule.max_wait)
    left = waits & batch
    picked = jnp.where(jnp.any(left), jnp.argmax(jnp.any(left, axis=1)), picked)
    batch = jnp.where(jnp.any(left), left, waits)[jnp.maximum(picked, 0)]
    options = [_fill(plan, schedule, run, table, batch) for run in plan.runs]
    choice, rows = (jnp.stack(values)[jnp.maximum(picked, 0)] for values in zip(*options, strict=True))
    return jnp.where(picked == policy.IDLE, NONE, choice), rows, batch


def _lodged(plan: Plan, run: Run, table: RequestTable) -> Bool[Array, "S"]:
    """Who has pages with all the models that read in a run; the others wait for the host to find them some."""
    return jnp.all(table.journey.lodged[:, jnp.array(plan.fleet.readers(run))], axis=1)


def _fill(plan: Plan, schedule: Schedule, run: Run, table: RequestTable, batch: Bool[Array, "S"]):
    """The choice, and its slots, if `run` is to be run for a batch: the bucket that serves its rows the quickest."""
    slots = jnp.arange(batch.shape[0])
    buckets, first = plan.buckets(run), plan.first(run)
    order = jnp.argsort(jnp.where(batch, -table.journey.waited, jnp.inf), stable=True)
    there = slots < jnp.sum(batch)
    need = jnp.cumsum(jnp.where(there, unread(plan.fleet, run, table, order), 0))
    rows, tokens = (jnp.array([getattr(bucket, name) for bucket in buckets]) for name in ("rows", "tokens"))
    fits = there[:, None] & (slots[:, None] < rows) & (need[:, None] <= tokens)
    start, per_row, per_token = schedule.seconds[first : first + len(buckets)].T
    load = start + per_row * (slots[:, None] + 1) + per_token * need[:, None]
    cost = jnp.where(fits, load, jnp.inf)  # of the first k rows: [S buckets]
    count = policy.rows(jnp.min(cost, axis=1))
    within = jnp.argmin(cost[count - 1])
    # what does not even fit alone is read in parts
    alone = jnp.all(jnp.isinf(cost))
    count, within = jnp.where(alone, 1, count), jnp.where(alone, len(buckets) - 1, within)
    taken = jnp.where(slots < count, order, NONE).astype(jnp.int32)
    return (first + within).astype(jnp.int32), taken


def _once(plan: Plan, weights: Weights, schedule: Schedule, index: int, loop: _Loop) -> _Loop:
    """The run of one choice."""
    run, bucket = plan.choices[index]
    rows = loop.rows[: bucket.rows]
    slot = jnp.maximum(rows, 0)
    before, need = loop.table, jnp.where(rows >= 0, unread(plan.fleet, run, loop.table, slot), 0)
    memories, table, ready = perform(plan.fleet, run, bucket, weights, loop.memories, before, rows)
    read = jnp.minimum(jnp.sum(need, dtype=jnp.int32), bucket.tokens)
    load = jnp.stack([jnp.ones_like(read), jnp.sum(rows >= 0, dtype=jnp.int32), read])
    table = _aged(table, rows, ready, jnp.sum(schedule.seconds[index] * load))
    reaches = jnp.stack([at(table.journey.turn, each)[slot] for each in plan.known])
    to = jnp.where(table.active[slot], jnp.argmax(reaches, axis=0), len(plan.known))
    origin = plan.known.index(run)
    counts = loop.counts
    counts = Counts(
        runs=counts.runs.at[index].add(1),
        rows=counts.rows.at[index].add(jnp.sum(ready, dtype=jnp.int32)),
        read=counts.read.at[index].add(read),
        moves=counts.moves.at[origin, to].add(ready.astype(jnp.int32)),
        commits=counts.commits.at[origin, to].add(jnp.where(ready, table.length[slot] - before.length[slot], 0)),
    )
    batch = loop.batch.at[jnp.where(ready, rows, NOWHERE)].set(False, mode="drop")
    replace = dict(choice=jnp.int32(NONE), batch=batch, memories=memories, table=table, counts=counts)
    return dataclasses.replace(loop, **replace)


def _aged(table: RequestTable, rows: Int[Array, "B"], ready: Bool[Array, "B"], seconds: Float[Array, ""]):
    """Everybody has waited for as long as the run took, but those who were served begin anew."""
    waited = table.journey.waited + seconds.astype(table.journey.waited.dtype)
    waited = waited.at[jnp.where(ready, rows, NOWHERE)].set(0, mode="drop")
    return dataclasses.replace(table, journey=dataclasses.replace(table.journey, waited=waited))
