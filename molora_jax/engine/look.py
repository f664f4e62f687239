"""The programs of a subserver: what it does to its table and memory, and what the host learns of it."""

import dataclasses

import jax
import jax.numpy as jnp

from molora_jax.engine.extend import read
from molora_jax.engine.fused import Counts, Plan, Schedule, super_step
from molora_jax.engine.handover import Standing, known, window
from molora_jax.engine.run import Weights
from molora_jax.engine.table import Entry, Memory, RequestTable, enter, settle, without_drafts
from molora_jax.typing import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seen:
    """What the host learns from one look: `shown` are the columns from the told or the `known` tokens on: [S W].

    `batch` are those who come next, whoever waits by then.
    """

    standing: Standing
    known: Int[Array, "S"]
    shown: dict[str, Array]
    counts: Counts
    batch: Bool[Array, "S"]


def look(
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
    forced: Int[Array, ""],
) -> tuple[Memory, RequestTable, Seen]:
    """Up to `steps` runs of model `index`, and what the host has to know after them; `forced` as in `super_step`."""
    journey = dataclasses.replace(table.journey, waited=waited)
    table = dataclasses.replace(table, active=active, journey=journey)
    memories = tuple(memory if i == index else None for i in range(len(plan.fleet.cfgs)))
    args = weights, schedule, memories, table, steps, jnp.bool_(True), forced, batch
    memories, table, counts, batch = super_step(plan, *args)
    has = known(table)
    seen = Seen(Standing.of(table), has, window(table, jnp.minimum(told, has), width), counts, batch)
    return memories[index], table, seen


def shadow(plan: Plan, index: int, weights: Weights, memory: Memory, table: RequestTable, rows: Int[Array, "S"]):
    """Model `index` reads what it can of the requests in slots `rows`, whose turn it is not; nothing else happens.

    Returns:
      The memory and the table, and how far it has read every request.
    """
    _, bucket = max(plan.choices, key=lambda choice: (choice[1].tokens, choice[1].rows))
    cfg, params, adapters = plan.fleet.cfgs[index], weights.models[index], weights.adapters[index]
    starts = table.anchor[jnp.maximum(rows, 0), index]
    own = dataclasses.replace(table, active=jnp.ones_like(table.active))
    memory, own, _ = read(cfg, bucket, params, adapters, memory, own, rows[: bucket.rows], model=index, starts=starts)
    return memory, dataclasses.replace(own, active=table.active), own.anchor[:, index]


def house(index: int, memory: Memory, table: RequestTable, slot: Int[Array, ""], housed: Bool[Array, ""], pages):
    """Gives a request other pages, or takes them away: then what was read is forgotten."""
    lodged = table.journey.lodged[slot].at[index].set(housed)
    own = jnp.where(jnp.arange(lodged.shape[0]) == index, lodged, True)
    (memory,), table = settle((memory,), table, slot, own, (pages,))
    return memory, table


def admit(memory: Memory, table: RequestTable, slot, row: RequestTable) -> tuple[Memory, RequestTable]:
    """Puts a request into a slot, without pages."""
    drafts = table.journey.drafts
    pages = jnp.zeros_like(memory.tables[0, slot])
    (memory,), table = enter((memory,), without_drafts(table), slot, Entry(row, (pages,)))
    return memory, dataclasses.replace(table, journey=dataclasses.replace(table.journey, drafts=drafts))


def set_drafts(table: RequestTable, slot: Int[Array, ""], rows: Float[Array, "K V"]) -> RequestTable:
    """Puts back the logits that a request's held tokens were drawn from."""
    journey = dataclasses.replace(table.journey, drafts=table.journey.drafts.at[slot].set(rows))
    return dataclasses.replace(table, journey=journey)


def set_knobs(table: RequestTable, slot: Int[Array, ""], values: dict[str, Array], changed: dict[str, Array]):
    """Sets those of a request's knobs that have `changed`."""
    put = lambda leaf, value, new: leaf.at[slot].set(jnp.where(new, value, leaf[slot]))
    knobs = jax.tree.map(put, table.journey.knobs, values, changed)
    return dataclasses.replace(table, journey=dataclasses.replace(table.journey, knobs=knobs))
