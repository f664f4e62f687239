"""One run of a routed request: a model reads, something comes of it, and the program decides what follows."""

import dataclasses

import jax
import jax.numpy as jnp

from molora_jax.config import ModelConfig
from molora_jax.engine import outcome as outcomes
from molora_jax.engine.buckets import Bucket
from molora_jax.engine.experts import Adapters
from molora_jax.engine.extend import read, scores
from molora_jax.engine.outcome import Outcome, Rows, has_window
from molora_jax.engine.sampling import log_prob
from molora_jax.engine.table import Memory, RequestTable
from molora_jax.nn.layout import NOWHERE
from molora_jax.routing import signals
from molora_jax.routing.program import KEEP, Decision, Mode, Program, Run
from molora_jax.routing.turn import Turn, ended, follow
from molora_jax.typing import Array, Bool, Float, Int, Params

MOST_RUNS = 100
"""Runs per token of its limit after which a request is given up: its program takes back all that is written."""


@dataclasses.dataclass(frozen=True)
class Fleet:
    """The models that a program routes between, and the program; static.

    Attributes:
      own: how many token ids each model may write, where every one has a tokenizer of its own; else none.
    """

    cfgs: tuple[ModelConfig, ...]
    program: Program
    own: tuple[int, ...] = ()

    @property
    def vocab(self) -> int:
        """Token ids that all models know: logits beyond are padding of the larger tables."""
        return min(cfg.vocab for cfg in self.cfgs)

    def writes(self, model: int) -> int:
        """Token ids that a model may write."""
        return self.own[model] if self.own else self.vocab

    def readers(self, run: Run) -> tuple[int, ...]:
        """The models that read in it."""
        return tuple(range(len(self.cfgs))) if run.mode == Mode.FUSE else (run.model,)

    def tail(self, run: Run) -> tuple[int, ...]:
        """Tokens that are read after each request's own."""
        return self.program.score_tokens if run.mode == Mode.SCORE else ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """What the programs of a routed engine read and never write.

    Attributes:
      models: the parameters of each model.
      adapters: each model's experts, or None.
      program: the routing program's parameters.
    """

    models: tuple[Params, ...]
    adapters: tuple[Adapters | None, ...]
    program: Params


@dataclasses.dataclass(frozen=True)
class _Seen:
    """What a model shows of the rows it has read; `window` and its hidden states where the run looks at a draft."""

    logits: Float[Array, "B V"]
    hidden: Float[Array, "B D"]
    window: Float[Array, "B K+1 V"] | None
    window_hidden: Float[Array, "B K+1 D"] | None
    ready: Bool[Array, "B"]


def starts(fleet: Fleet, run: Run, model: int, table: RequestTable, slot: Int[Array, "B"]) -> Int[Array, "B"]:
    """Where a run begins to read: what its model has not read, at least the last token, and the draft it judges."""
    looks = has_window(fleet.program, run.mode)
    back = jnp.minimum(table.journey.turn.hold[slot], fleet.program.draft) if looks else 0
    before = 0 if fleet.tail(run) and not looks else 1  # a tail alone has logits enough
    return jnp.maximum(jnp.minimum(table.anchor[slot, model], table.length[slot] - before - back), 0)


def unread(fleet: Fleet, run: Run, table: RequestTable, slot: Int[Array, "B"]) -> Int[Array, "B"]:
    """Tokens that a run has to read of each request; of FUSE, by the model that has most to."""
    total = table.length[slot] + len(fleet.tail(run))
    each = [total - starts(fleet, run, model, table, slot) for model in fleet.readers(run)]
    return jnp.max(jnp.stack(each), axis=0)


def perform(
    fleet: Fleet,
    run: Run,
    bucket: Bucket,
    weights: Weights,
    memories: tuple[Memory, ...],
    table: RequestTable,
    rows: Int[Array, "B"],
) -> tuple[tuple[Memory, ...], RequestTable, Bool[Array, "B"]]:
    """Runs the requests in slots `rows` (-1 pads), all of which wait for `run`, one run further.

    Reads at most `bucket.tokens` tokens, the first rows first; a row that is not read to its end waits on.

    Returns:
      The memories and the table, and which rows were read to their ends.
    """
    slot = jnp.maximum(rows, 0)
    kept, seen = list(memories), {}
    for model in fleet.readers(run):
        kept[model], table, seen[model] = _see(fleet, run, model, bucket, weights, kept[model], table, rows)
    ready = jnp.all(jnp.stack([each.ready for each in seen.values()]), axis=0)
    gathered = Rows.of(table, slot)
    outcome = _outcome(fleet, run, weights, table, gathered, seen)
    to = jnp.where(ready, rows, NOWHERE)
    table = _write(table, gathered, outcome, to)
    return tuple(kept), _decide(fleet, run, weights, table, gathered, outcome, to), ready


def _see(fleet: Fleet, run: Run, model: int, bucket: Bucket, weights: Weights, memory, table, rows):
    cfg, params, adapters = fleet.cfgs[model], weights.models[model], weights.adapters[model]
    slot = jnp.maximum(rows, 0)
    at, tail = starts(fleet, run, model, table, slot), fleet.tail(run)
    memory, table, reading = read(cfg, bucket, params, adapters, memory, table, rows, model=model, starts=at, tail=tail)
    project = lambda index: scores(cfg, params, adapters, reading, index)[:, : fleet.writes(model)]
    last = jnp.maximum(reading.ends - 1, 0)
    if not has_window(fleet.program, run.mode):
        return memory, table, _Seen(project(last), reading.hidden[last], None, None, reading.ready)
    K = fleet.program.draft
    window = jnp.maximum(reading.ends[:, None] - 1 - len(tail) - K + jnp.arange(K + 1), 0)
    flat = window.reshape(-1)
    many = project(jnp.concatenate([flat, last]) if tail else flat)
    windowed = many[: flat.size].reshape(*window.shape, -1)
    hidden = reading.hidden[flat].reshape(*window.shape, -1)
    logits = many[flat.size :] if tail else windowed[:, -1]
    return memory, table, _Seen(logits, reading.hidden[last], windowed, hidden, reading.ready)


def _outcome(fleet: Fleet, run: Run, weights: Weights, table: RequestTable, rows: Rows, seen: dict[int, _Seen]):
    program, params = fleet.program, weights.program
    of = seen[program.hidden_of] if run.mode == Mode.FUSE else seen[run.model]
    if run.mode == Mode.VERIFY:
        out = outcomes.verified(program, params, table, rows, of.window, of.window_hidden)
    elif run.mode == Mode.SCORE:
        window = None if of.window is None else of.window[:, :-1]
        out = outcomes.scored(program, params, table, rows, of.logits, of.hidden, window)
    elif run.mode == Mode.FUSE:
        logits = outcomes.fused(program, params, rows, [each.logits for each in seen.values()])
        out = outcomes.written(program, rows, logits, of.hidden)
    else:
        out = outcomes.written(program, rows, of.logits, of.hidden)
    if program.hidden_of not in seen and "hidden" in program.signals:
        width = fleet.cfgs[program.hidden_of].width
        out = dataclasses.replace(out, hidden=jnp.zeros((out.length.shape[0], width), out.hidden.dtype))
    return out


def _write(table: RequestTable, rows: Rows, outcome: Outcome, to: Int[Array, "B"]) -> RequestTable:
    """Commits the tokens of an outcome; `to` are the slots, beyond any where nothing is to be kept."""
    journey, at = table.journey, outcome.length
    there = jnp.where(outcome.wrote, to, NOWHERE)
    put = lambda leaf, value: leaf.at[there, at].set(value.astype(leaf.dtype), mode="drop")
    if journey.drafts is not None:
        place = there, at % journey.drafts.shape[1]
        drafts = journey.drafts.at[place].set(outcome.logits.astype(journey.drafts.dtype), mode="drop")
        journey = dataclasses.replace(journey, drafts=drafts)
    if journey.entropy is not None:
        values = jax.vmap(signals.entropy)(outcome.logits)
        journey = dataclasses.replace(journey, entropy=put(journey.entropy, values))
    return dataclasses.replace(
        table,
        tokens=put(table.tokens, outcome.token),
        length=table.length.at[to].set(at + outcome.wrote, mode="drop"),
        logprobs=put(table.logprobs, log_prob(outcome.logits, outcome.token, table.logprob_at[rows.slot])),
        experts=None if table.experts is None else put(table.experts, rows.turn.adapter),
        journey=dataclasses.replace(journey, writers=put(journey.writers, rows.turn.model)),
    )


def _decide(
    fleet: Fleet, run: Run, weights: Weights, table: RequestTable, rows: Rows, outcome: Outcome, to: Int[Array, "B"]
) -> RequestTable:
    """The program sees the signals and says what follows; tokens are taken back, and requests end."""
    program, slot, journey = fleet.program, rows.slot, table.journey
    length = outcome.length + outcome.wrote
    sig = _signals(program, run, table, rows, outcome, length)
    step = jax.vmap(program.step, in_axes=(None, 0, 0, 0, 0))
    state, decision = step(weights.program, rows.knobs, rows.state, rows.turn.model, sig)
    held = dataclasses.replace(rows.turn, hold=outcome.hold)
    turn, drop = jax.vmap(lambda *args: follow(program, *args))(held, decision, outcome.wrote.astype(jnp.int32))
    last = length - 1
    length = length - drop
    runs = journey.runs[slot] + 1
    stuck = runs >= MOST_RUNS * table.limit[slot]
    over = ended(turn, _stopped(table, slot, length)) | stuck
    turn = dataclasses.replace(turn, hold=jnp.where(over, 0, turn.hold))
    put = lambda leaf, value: leaf.at[to].set(value.astype(leaf.dtype), mode="drop")
    kept = jnp.minimum(outcome.length, length)
    return dataclasses.replace(
        table,
        length=put(table.length, length),
        active=put(table.active, ~over),
        anchor=put(table.anchor, jnp.minimum(table.anchor[slot], kept[:, None])),
        experts=_renamed(table, decision, outcome, to, last, drop),
        journey=dataclasses.replace(
            journey,
            turn=jax.tree.map(put, journey.turn, turn),
            state=jax.tree.map(put, journey.state, state),
            runs=put(journey.runs, runs),
        ),
    )


def _renamed(table: RequestTable, decision: Decision, outcome: Outcome, to, last, drop) -> Int[Array, "S T"] | None:
    """The adapters of all tokens: a decision about the next ones is about the one just written too."""
    if table.experts is None:
        return None
    changed = outcome.wrote & (drop == 0) & (decision.adapter != KEEP)
    return table.experts.at[jnp.where(changed, to, NOWHERE), last].set(decision.adapter, mode="drop")


def _stopped(table: RequestTable, slot: Int[Array, "B"], length: Int[Array, "B"]) -> Bool[Array, "B"]:
    """Whether the last token written stops the request, or the limit is reached."""
    token = table.tokens[slot, jnp.maximum(length - 1, 0)]
    stop = jnp.any(token[:, None] == table.stops[slot], axis=-1) | (length >= table.limit[slot])
    return stop & (length > table.journey.prompt[slot])


def _signals(program: Program, run: Run, table: RequestTable, rows: Rows, outcome: Outcome, length: Int[Array, "B"]):
    width = signals.window(program.patterns)
    at = length[:, None] - width + jnp.arange(width)
    recent = jnp.where(at >= 0, table.tokens[rows.slot[:, None], jnp.maximum(at, 0)], -1)
    known = dict(
        logits=outcome.logits,
        token=outcome.token,
        recent=recent,
        position=length - 1,
        since_handoff=_since(rows.turn, outcome),
        mode=jnp.full_like(length, int(run.mode)),
        stop=_stopped(table, rows.slot, length),
        hidden=outcome.hidden,
        score=outcome.score,
        accepted=outcome.accepted,
        span_logprobs=outcome.span_logprobs,
    )
    return jax.vmap(lambda values: signals.measure(program, **values))(known)


def _since(turn: Turn, outcome: Outcome) -> Int[Array, "B"]:
    return turn.since + outcome.wrote
