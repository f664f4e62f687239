"""The requests in flight, as arrays on the device: one slot each."""

import dataclasses

import jax
import jax.numpy as jnp

from molora_jax.adapters.bank import Bank
from molora_jax.config import ModelConfig
from molora_jax.engine.journey import Journey
from molora_jax.engine.sampling import Sampling
from molora_jax.models.state import DecodeState, new_state
from molora_jax.typing import Array, Bool, Float, Int

MAX_STOPS = 8
"""Stop tokens that one request may have."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RequestTable:
    """What the requests are, whatever model runs them. S slots, contexts of at most T tokens, M models.

    Attributes:
      tokens: prompt and committed tokens of each slot.
      length: how many of them there are.
      limit: the length at which the request ends.
      active: neither free nor ended.
      anchor: how many of a request's tokens each model has read.
      sampling: how each request picks its next token.
      stops: token ids that end a request, padded with -1.
      logprobs: log-probability of each committed token, where it was asked for.
      logprob_at: at which temperature, 1 being the model's own distribution; 0 where it was not.
      experts: the adapter of each token, in an engine that has any (`engine.experts`).
      trace: the experts that each token really used, layer by layer, where they are recorded.
      journey: where a routing program has taken each request, in an engine that has one.
    """

    tokens: Int[Array, "S T"]
    length: Int[Array, "S"]
    limit: Int[Array, "S"]
    active: Bool[Array, "S"]
    anchor: Int[Array, "S M"]
    sampling: Sampling
    stops: Int[Array, "S stops"]
    logprobs: Float[Array, "S T"]
    logprob_at: Float[Array, "S"]
    experts: Int[Array, "S T"] | None = None
    trace: Int[Array, "S T K"] | None = None
    journey: Journey | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """What one model remembers of the requests.

    Attributes:
      state: its KV rows, in which the tokens before a request's anchor are.
      tables: the pages of each slot, one table a kind of layer.
      scout: the state of the base alone, in pages of the same numbers, where its hidden states decide the route.
    """

    state: DecodeState
    tables: Int[Array, "kinds S P"]
    scout: DecodeState | None = None


def new_table(
    slots: int,
    length: int,
    *,
    models: int = 1,
    experts: bool = False,
    traced: int = 0,
    journey: Journey | None = None,
) -> RequestTable:
    """`slots` free slots for contexts of at most `length` tokens; `traced` choices a token are recorded."""
    zeros = lambda *shape, dtype=jnp.int32: jnp.zeros(shape, dtype)
    return RequestTable(
        tokens=zeros(slots, length),
        length=zeros(slots),
        limit=zeros(slots),
        active=zeros(slots, dtype=bool),
        anchor=zeros(slots, models),
        sampling=Sampling.greedy(slots),
        stops=jnp.full((slots, MAX_STOPS), -1, jnp.int32),
        logprobs=zeros(slots, length, dtype=jnp.float32),
        logprob_at=zeros(slots, dtype=jnp.float32),
        experts=zeros(slots, length) if experts else None,
        trace=zeros(slots, length, traced, dtype=jnp.int16) if traced else None,
        journey=journey,
    )


def new_memory(
    cfg: ModelConfig,
    slots: int,
    length: int,
    *,
    pages: tuple[int, ...],
    page_size: int,
    dtype,
    bank: Bank | None = None,
    scout: bool = False,
) -> Memory:
    """An empty memory with `pages[k]` pages for every layer of kind k, and room for what the gates of a bank keep."""
    sizes = dict(pages=pages, page_size=page_size, dtype=dtype)
    return Memory(
        state=new_state(cfg, **sizes, bank=bank, slots=slots),
        scout=new_state(cfg, **sizes) if scout else None,
        tables=jnp.zeros((len(cfg.kinds), slots, -(-length // page_size)), jnp.int32),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entry:
    """One request as it enters a slot.

    Attributes:
      row: its row of the table, all leaves without their leading S.
      tables: its pages in each model's memory.
    """

    row: RequestTable
    tables: tuple[Int[Array, "kinds P"], ...]


def enter(
    memories: tuple[Memory, ...], table: RequestTable, slot: Int[Array, ""], entry: Entry
) -> tuple[tuple[Memory, ...], RequestTable]:
    """Puts a request into a free slot; what its anchors say has been read is in the models' pages already."""
    table = jax.tree.map(lambda leaf, value: leaf.at[slot].set(value), table, entry.row)
    give = lambda memory, pages: dataclasses.replace(memory, tables=memory.tables.at[:, slot].set(pages))
    return tuple(map(give, memories, entry.tables)), table


def without_drafts(table: RequestTable) -> RequestTable:
    """The table, or a row of it, without the logits of drafts, which are most of its bytes."""
    return dataclasses.replace(table, journey=dataclasses.replace(table.journey, drafts=None))


def stop(table: RequestTable, slots: Bool[Array, "S"]) -> RequestTable:
    """Ends the requests in `slots` where they stand."""
    return dataclasses.replace(table, active=table.active & ~slots)


def settle(
    memories: tuple[Memory, ...],
    table: RequestTable,
    slot: Int[Array, ""],
    lodged: Bool[Array, "M"],
    tables: tuple[Int[Array, "P"], ...],
) -> tuple[tuple[Memory, ...], RequestTable]:
    """Gives a routed request other pages; what a model without any has read is forgotten."""
    give = lambda memory, pages: dataclasses.replace(memory, tables=memory.tables.at[:, slot].set(pages))
    journey = dataclasses.replace(table.journey, lodged=table.journey.lodged.at[slot].set(lodged))
    anchor = table.anchor.at[slot].set(jnp.where(lodged, table.anchor[slot], 0))
    return tuple(map(give, memories, tables)), dataclasses.replace(table, anchor=anchor, journey=journey)
