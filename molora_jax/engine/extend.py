"""The only place where a model runs at serving time: read the tokens it has not seen, commit the next."""

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


def extend(
    cfg: ModelConfig,
    bucket: Bucket,
    params: Params,
    adapters: Adapters | None,
    memory: Memory,
    table: RequestTable,
    rows: Int[Array, "B"],
) -> tuple[Memory, RequestTable]:
    """One run of the model over what it has not read of the requests in slots `rows` (-1 pads).

    Reads at most `bucket.tokens` of them, the first rows first. A row whose tokens are all read gets its next one.
    A token that was just committed is the suffix of the next call, so that prefill in chunks, decoding, and catching up
    with what others wrote are one and the same.
    """
    slot = jnp.maximum(rows, 0)
    length, anchor = table.length[slot], memory.anchor[slot]
    unread = jnp.where((rows >= 0) & table.active[slot], length - anchor, 0)
    ends = jnp.minimum(jnp.cumsum(unread), bucket.tokens)
    taken = jnp.diff(ends, prepend=0)
    layout = ragged(
        anchor,
        taken,
        memory.tables[:, slot],
        tokens=bucket.tokens,
        tile=bucket.tile,
        page_size=memory.state.page_size,
        slots=_to(rows),
    )
    at = slot[jnp.minimum(layout.rows, bucket.rows - 1)], layout.positions
    last = jnp.maximum(ends - 1, 0)
    real = layout.rows < bucket.rows
    tokens, scout, experts, own = table.tokens[at], memory.scout, {}, {}
    if adapters is not None:
        ids = jnp.where(real, table.experts[at], NONE)
        route, scout = _route(cfg, params, adapters, ids, tokens, layout, scout)
        experts = dict(bank=adapters.bank, route=route)
        own = dict(bank=adapters.bank, ids=ids[last])
    out = transformer.apply(cfg, params, tokens, layout, memory.state, **experts)
    scores = transformer.logits(cfg, params, out.hidden[last], **own)
    if table.trace is not None:
        to = jnp.where(real, at[0], NOWHERE), at[1]
        table = dataclasses.replace(table, trace=table.trace.at[to].set(traced(out.trace), mode="drop"))
    memory = Memory(out.state, memory.anchor.at[_to(rows)].add(taken, mode="drop"), memory.tables, scout)
    return memory, _commit(table, adapters, rows, scores, ready=(taken > 0) & (taken == unread))


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
    wanted = table.wants_logprobs[slot] & ready
    zeros = jnp.zeros(rows.shape, scores.dtype)
    logprob = only_if(jnp.any(wanted), lambda s: jnp.where(wanted, log_prob(s, token), zeros), zeros, scores)
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
    leave: Bool[Array, ""],
) -> tuple[Memory, RequestTable, Report]:
    """Extends the rows up to `steps` (at most `bucket.steps`) times in one device program.

    Returns early when no row is left, or, if `leave`, as soon as one has ended: others wait for its slot.
    """
    slot = jnp.maximum(rows, 0)
    alive = lambda table: (rows >= 0) & table.active[slot]
    before, begun = table.length[slot], alive(table)

    def go_on(carry):
        i, _, table = carry
        now = alive(table)
        return (i < steps) & jnp.any(now) & ~(leave & jnp.any(begun & ~now))

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
            anchor=memory.anchor[slot],
            steps=ran,
        ),
    )
