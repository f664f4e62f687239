"""The only place where a model runs at serving time: it reads the tokens it has not seen, and may write the next."""

import dataclasses

import jax
import jax.numpy as jnp

from molora_jax.adapters.route import NONE, Choice, Route
from molora_jax.config import ModelConfig
from molora_jax.engine.buckets import Bucket
from molora_jax.engine.experts import Adapters, next_expert, traced
from molora_jax.engine.sampling import log_prob, only_if, sample
from molora_jax.engine.table import Memory, RequestTable
from molora_jax.models import transformer
from molora_jax.models.state import DecodeState
from molora_jax.nn.layout import NOWHERE, ragged
from molora_jax.typing import Array, Bool, Float, Int, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """What the host learns from one program.

    Attributes:
      tokens: the tokens each row was given, in order.
      logprobs: theirs, where asked for.
      count: how many.
      active: whether the row goes on.
      anchor: how many of the row's tokens the model has read.
      steps: how many times the model ran.
    """

    tokens: Int[Array, "B steps"]
    logprobs: Float[Array, "B steps"]
    count: Int[Array, "B"]
    active: Bool[Array, "B"]
    anchor: Int[Array, "B"]
    steps: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reading:
    """What a run has made of the tokens it read.

    Attributes:
      hidden: last hidden states: [N, D].
      ids: the expert of each token, in an engine that has any.
      ends: index in them behind each row's last token.
      ready: whether the row has now been read to its end.
    """

    hidden: Float[Array, "N D"]
    ids: Int[Array, "N"] | None
    ends: Int[Array, "B"]
    ready: Bool[Array, "B"]


def read(
    cfg: ModelConfig,
    bucket: Bucket,
    params: Params,
    adapters: Adapters | None,
    memory: Memory,
    table: RequestTable,
    rows: Int[Array, "B"],
    *,
    model: int,
    starts: Int[Array, "B"],
    tail: tuple[int, ...] = (),
) -> tuple[Memory, RequestTable, Reading]:
    """Model `model` reads the requests in slots `rows` (-1 pads) from positions `starts` to their ends.

    Reads at most `bucket.tokens` tokens, the first rows first. What it has read before is written once more, the same.

    Args:
      tail: tokens that are read after each request's own, and forgotten.
    """
    slot = jnp.maximum(rows, 0)
    length = table.length[slot]
    unread = jnp.where((rows >= 0) & table.active[slot], length + len(tail) - starts, 0)
    ends = jnp.minimum(jnp.cumsum(unread), bucket.tokens)
    taken = jnp.diff(ends, prepend=0)
    layout = ragged(
        starts,
        taken,
        memory.tables[:, slot],
        tokens=bucket.tokens,
        tile=bucket.tile,
        page_size=memory.state.page_size,
        slots=_to(rows),
    )
    row = jnp.minimum(layout.rows, bucket.rows - 1)
    beyond = layout.positions - length[row]
    at = slot[row], jnp.minimum(layout.positions, length[row] - 1) if tail else layout.positions
    tokens, scout, experts, ids = table.tokens[at], memory.scout, {}, None
    if tail:
        tokens = jnp.where(beyond < 0, tokens, jnp.asarray(tail, jnp.int32)[jnp.clip(beyond, 0, len(tail) - 1)])
    real = layout.rows < bucket.rows
    if adapters is not None:
        ids = jnp.where(real, table.experts[at], NONE)
        route, scout = _route(cfg, params, adapters, ids, tokens, layout, scout)
        experts = dict(bank=adapters.bank, route=route)
    out = transformer.apply(cfg, params, tokens, layout, memory.state, **experts)
    if table.trace is not None:
        to = jnp.where(real, at[0], NOWHERE), at[1]
        table = dataclasses.replace(table, trace=table.trace.at[to].set(traced(out.trace), mode="drop"))
    to = jnp.where(taken > 0, _to(rows), NOWHERE)
    anchor = table.anchor.at[to, model].set(jnp.minimum(starts + taken, length), mode="drop")
    reading = Reading(out.hidden, ids, ends, ready=(taken > 0) & (taken == unread))
    return Memory(out.state, memory.tables, scout), dataclasses.replace(table, anchor=anchor), reading


def scores(
    cfg: ModelConfig, params: Params, adapters: Adapters | None, reading: Reading, at: Int[Array, "K"]
) -> Float[Array, "K V"]:
    """Logits from the hidden states at some indices."""
    own = {} if adapters is None else dict(bank=adapters.bank, ids=reading.ids[at])
    return transformer.logits(cfg, params, reading.hidden[at], **own)


def extend(
    cfg: ModelConfig,
    bucket: Bucket,
    params: Params,
    adapters: Adapters | None,
    memory: Memory,
    table: RequestTable,
    rows: Int[Array, "B"],
) -> tuple[Memory, RequestTable]:
    """The only model of an engine reads what it has not seen of some requests, and writes their next tokens.

    A token that was just committed is the suffix of the next call, so that prefill in chunks and decoding are one and
    the same.
    """
    starts = table.anchor[jnp.maximum(rows, 0), 0]
    memory, table, reading = read(cfg, bucket, params, adapters, memory, table, rows, model=0, starts=starts)
    last = scores(cfg, params, adapters, reading, jnp.maximum(reading.ends - 1, 0))
    return memory, _commit(table, adapters, rows, last, ready=reading.ready)


def _route(cfg, params, adapters: Adapters, ids: Int[Array, "N"], tokens, layout, scout: DecodeState | None):
    """Who decides: the ids, the router inside the layers, or one that reads what the base alone makes of the tokens."""
    if scout is None:
        return dataclasses.replace(Route.of(ids), router=adapters.router), None
    first = transformer.apply(cfg, params, tokens, layout, scout)
    return adapters.router.route(first.hidden, Choice(ids=ids)), first.state


def _commit(
    table: RequestTable,
    adapters: Adapters | None,
    rows: Int[Array, "B"],
    scores: Float[Array, "B V"],
    *,
    ready: Bool[Array, "B"],
) -> RequestTable:
    """Writes the next token of the `ready` rows and ends those that reach a stop token or their limit."""
    slot = jnp.maximum(rows, 0)
    length = table.length[slot]
    token = sample(scores, jax.tree.map(lambda leaf: leaf[slot], table.sampling), length)
    at = table.logprob_at[slot]
    wanted = (at > 0) & ready
    zeros = jnp.zeros(rows.shape, scores.dtype)
    logprob = only_if(jnp.any(wanted), lambda s: jnp.where(wanted, log_prob(s, token, at), zeros), zeros, scores)
    ended = jnp.any(token[:, None] == table.stops[slot], axis=-1) | (length + 1 >= table.limit[slot])
    to = jnp.where(ready, _to(rows), NOWHERE)
    experts = table.experts
    if adapters is not None:
        expert = next_expert(adapters, experts[slot, length], token, experts[slot, jnp.maximum(length - 1, 0)])
        experts = experts.at[to, length].set(expert, mode="drop")
    return dataclasses.replace(
        table,
        experts=experts,
        tokens=table.tokens.at[to, length].set(token, mode="drop"),
        logprobs=table.logprobs.at[to, length].set(logprob.astype(jnp.float32), mode="drop"),
        length=table.length.at[to].add(1, mode="drop"),
        active=table.active.at[to].set(~ended, mode="drop"),
    )


def _to(rows: Int[Array, "B"]) -> Int[Array, "B"]:
    """Slots to scatter to; pads go nowhere."""
    return jnp.where(rows >= 0, rows, NOWHERE)


def advance(
    cfg: ModelConfig,
    bucket: Bucket,
    params: Params,
    adapters: Adapters | None,
    memory: Memory,
    table: RequestTable,
    rows: Int[Array, "B"],
    steps: Int[Array, ""],
    leave: Int[Array, ""],
) -> tuple[Memory, RequestTable, Report]:
    """Extends the rows up to `steps` (at most `bucket.steps`) times in one device program.

    Returns early when no row is left, or as soon as `leave` of them have ended (0: never): others wait for their slots.
    """
    slot = jnp.maximum(rows, 0)
    alive = lambda table: (rows >= 0) & table.active[slot]
    before, begun = table.length[slot], alive(table)

    def go_on(carry):
        i, _, table = carry
        now = alive(table)
        return (i < steps) & jnp.any(now) & ~((leave > 0) & (jnp.sum(begun & ~now) >= leave))

    def step(carry):
        i, memory, table = carry
        return i + 1, *extend(cfg, bucket, params, adapters, memory, table, rows)

    if bucket.steps == 1:
        (memory, table), ran = extend(cfg, bucket, params, adapters, memory, table, rows), jnp.int32(1)
    else:
        ran, memory, table = jax.lax.while_loop(go_on, step, (jnp.int32(0), memory, table))
    at = slot[:, None], before[:, None] + jnp.arange(bucket.steps)
    return (
        memory,
        table,
        Report(
            tokens=table.tokens[at],
            logprobs=table.logprobs[at],
            count=table.length[slot] - before,
            active=alive(table),
            anchor=table.anchor[slot, 0],
            steps=ran,
        ),
    )
