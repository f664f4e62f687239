"""What travels when a request goes from one subserver's table to another's: what the receiver cannot know, no more.

KV never travels. Every subserver has the prompt and the knobs from the start, and a receiver has the tokens that its
model has read, so that what is sent grows with the tokens written since then, and not with the context.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.engine.table import RequestTable
from molora_jax.nn.layout import NOWHERE
from molora_jax.routing.turn import Turn
from molora_jax.typing import Array, Bool, Float, Int, Params

COLUMNS = ("tokens", "logprobs", "experts")
JOURNEY_COLUMNS = ("writers", "entropy")
"""Leaves of the table, and of its journey, that have a value for each token."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Standing:
    """What runs change of a request, its tokens apart: fields of the table and of its journey, S or k of them."""

    length: Int[Array, "S"]
    active: Bool[Array, "S"]
    anchor: Int[Array, "S M"]
    turn: Turn
    state: Params
    runs: Int[Array, "S"]

    @classmethod
    def of(cls, table: RequestTable) -> "Standing":
        journey = table.journey
        own = table.length, table.active, table.anchor
        return cls(*own, journey.turn, journey.state, journey.runs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parcel:
    """k requests on their way to another subserver; numpy arrays.

    Attributes:
      number, slot: who they are: numbers are never used twice, slots are.
      told: how many of their tokens the caller has been told of.
      start, count: the positions of the tokens that are sent, `start` and the `count` from there on.
      standing: where they stand.
      columns: by name, n values of each, `count` of which mean something.
      drafts: logits that the last h tokens were drawn from, of a program that verifies, and of held tokens (else h is
        0). They go whole, V numbers each: `accept` may look at all of them.
    """

    number: Int[np.ndarray, "k"]
    slot: Int[np.ndarray, "k"]
    told: Int[np.ndarray, "k"]
    start: Int[np.ndarray, "k"]
    count: Int[np.ndarray, "k"]
    standing: Standing
    columns: dict[str, np.ndarray]
    drafts: Float[np.ndarray, "k h V"]


def columns(table: RequestTable) -> dict[str, Array]:
    """The leaves that have a value for each token: [S T]."""
    own = {name: getattr(table, name) for name in COLUMNS}
    own |= {name: getattr(table.journey, name) for name in JOURNEY_COLUMNS}
    return {name: column for name, column in own.items() if column is not None}


def known(table: RequestTable) -> Int[Array, "S"]:
    """How many of its tokens whoever has the turn has: those that its model has read, and the prompt."""
    journey = table.journey
    return jnp.maximum(journey.prompt, jnp.take_along_axis(table.anchor, journey.turn.model[:, None], axis=1)[:, 0])


def window(table: RequestTable, starts: Int[Array, "S"], width: int) -> dict[str, Array]:
    """Of every slot, the values of `width` tokens from `starts` on: [S W]."""
    at = jnp.minimum(starts[:, None] + jnp.arange(width), table.tokens.shape[1] - 1)
    return {name: jnp.take_along_axis(column, at, axis=1) for name, column in columns(table).items()}


def receive(
    table: RequestTable,
    slots: Int[Array, "S"],
    starts: Int[Array, "S"],
    counts: Int[Array, "S"],
    standing: Standing,
    given: dict[str, Array],
) -> RequestTable:
    """Puts requests back into their slots (-1 pads), `counts` values of each column from `starts` on: [S W]."""
    to = jnp.where(slots >= 0, slots, NOWHERE)
    nth = jnp.arange(given["tokens"].shape[1])
    rows = jnp.where(nth < counts[:, None], to[:, None], NOWHERE)
    at = rows, starts[:, None] + nth
    put = lambda leaf, value: leaf.at[to].set(value, mode="drop")
    new = {name: column.at[at].set(given[name], mode="drop") for name, column in columns(table).items()}
    journey = dataclasses.replace(
        table.journey,
        turn=jax.tree.map(put, table.journey.turn, standing.turn),
        state=jax.tree.map(put, table.journey.state, standing.state),
        runs=put(table.journey.runs, standing.runs),
        **{name: new.pop(name) for name in JOURNEY_COLUMNS if name in new},
    )
    return dataclasses.replace(
        table,
        length=put(table.length, standing.length),
        active=put(table.active, standing.active),
        anchor=put(table.anchor, standing.anchor),
        journey=journey,
        **new,
    )


def cut(values: dict[str, np.ndarray], offset: Int[np.ndarray, "k"], count: Int[np.ndarray, "k"]):
    """Of each row of some columns the values from `offset` on, as many as the longest `count`: [k n]."""
    at = offset[:, None] + np.arange(np.max(count, initial=0))
    pick = lambda column: np.take_along_axis(column, np.minimum(at, column.shape[1] - 1), axis=1)
    return {name: pick(column) for name, column in values.items()}


def rolled(drafts: Float[np.ndarray, "K V"], length: int, hold: int) -> Float[np.ndarray, "h V"]:
    """Of logits kept at positions modulo K, those of the last `hold` tokens, in order."""
    return drafts[np.arange(length - hold, length) % len(drafts)]


def unrolled(rows: Float[np.ndarray, "h V"], length: int, draft: int) -> Float[np.ndarray, "K V"]:
    """The inverse of `rolled`: what else there was is zero, for nobody looks at it."""
    drafts = np.zeros((draft, rows.shape[1]), rows.dtype)
    drafts[np.arange(length - len(rows), length) % draft] = rows
    return drafts
