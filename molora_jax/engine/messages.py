"""What subservers and the front end say to each other, and its form as bytes between processes."""

import dataclasses
import enum
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from molora_jax.engine.fused import Counts, Schedule
from molora_jax.engine.handover import Parcel, Standing, columns
from molora_jax.engine.table import RequestTable, without_drafts
from molora_jax.typing import Bool, Float, Int

FRONT = -1
"""Index of the front end among those who get messages."""

MAGIC = 0x4D4C


class Kind(enum.IntEnum):
    """Of a message; the payload is a pytree of numpy arrays.

    From the front end:
      ENTER: a request gets its slot (`Entrance`).
      STOP: requests have ended, numbers and slots; also from the subserver where they did.
      KNOBS: slot, all knobs, and which of them are meant.
      SCHEDULE: `fused.Schedule`.
      TIME: context and repeats; the subserver, which has no request, measures its choices.
      PLAN: text; how a process shall build its subserver.
      CLOSE: nothing; the subserver ends.
    Between subservers:
      HAND: `handover.Parcel`.
    To the front end, from subserver i:
      HELLO: i and text; a process has loaded its model.
      READY: i; everything is compiled.
      NEWS: i and `News`.
      TIMES: i, and the fields of `timing.Times`.
      FAILED: i and text; the subserver has ended.
    """

    ENTER = 0
    STOP = 1
    KNOBS = 2
    SCHEDULE = 3
    PLAN = 4
    CLOSE = 5
    HAND = 6
    HELLO = 7
    READY = 8
    NEWS = 9
    FAILED = 10
    TIME = 11
    TIMES = 12


class Message(NamedTuple):
    kind: Kind
    payload: Any = ()


PLAIN = {
    kind: jax.tree.structure(payload)
    for kind, payload in {
        Kind.PLAN: 0,
        Kind.CLOSE: (),
        Kind.HELLO: (0, 0),
        Kind.READY: 0,
        Kind.FAILED: (0, 0),
        Kind.TIME: (0, 0),
        Kind.TIMES: (0, 0, 0),
    }.items()
}
"""Forms of the messages that tell of no request."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entrance:
    """A new request; numpy arrays.

    Attributes:
      row: of the table, without the logits of drafts.
      size: pages that it needs in every memory.
    """

    number: Int[np.ndarray, ""]
    slot: Int[np.ndarray, ""]
    row: RequestTable
    size: Int[np.ndarray, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class News:
    """What came of a look, for the callers.

    Attributes:
      number, count, over: of k requests, the next `count` tokens, and whether those are the last.
      columns: of those tokens, by name: [k n].
      counts: what was done, by the choices of the subserver's own plan.
      seconds: that it took.
    """

    number: Int[np.ndarray, "k"]
    count: Int[np.ndarray, "k"]
    over: Bool[np.ndarray, "k"]
    columns: dict[str, np.ndarray]
    counts: Counts
    seconds: Float[np.ndarray, ""]


def text(value: str) -> np.ndarray:
    return np.frombuffer(value.encode(), np.uint8)


def read_text(value: np.ndarray) -> str:
    return value.tobytes().decode()


def encode(message: Message) -> bytes:
    """Its kind and how many arrays, then of each its dtype's name, shape and contents; little-endian, no padding."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(message.payload)]
    parts = [struct.pack("<HBH", MAGIC, message.kind, len(leaves))]
    for leaf in leaves:
        name = leaf.dtype.name.encode()
        parts.append(struct.pack(f"<B{len(name)}sB{leaf.ndim}Q", len(name), name, leaf.ndim, *leaf.shape))
        parts.append(leaf.tobytes())
    return b"".join(parts)


def decode(data: bytes, forms: Mapping[Kind, jax.tree_util.PyTreeDef]) -> Message:
    """The inverse of `encode`; `forms` says which pytree the payload of each kind is.

    Raises:
      ValueError: data that `encode` did not make, or of other forms.
    """
    magic, kind, count = struct.unpack_from("<HBH", data)
    if magic != MAGIC:
        raise ValueError("message: got bytes of something else")
    at, leaves = struct.calcsize("<HBH"), []
    for _ in range(count):
        (size,) = struct.unpack_from("<B", data, at)
        name, ndim = struct.unpack_from(f"<{size}sB", data, at + 1)
        shape = struct.unpack_from(f"<{ndim}Q", data, at + 2 + size)
        at += 2 + size + 8 * ndim
        dtype = np.dtype(name.decode())
        length = math.prod(shape)
        leaves.append(np.frombuffer(data, dtype, length, at).reshape(shape))
        at += length * dtype.itemsize
    return Message(Kind(kind), jax.tree.unflatten(forms[Kind(kind)], leaves))


def forms(table: RequestTable) -> dict[Kind, jax.tree_util.PyTreeDef]:
    """Which pytree the payload of each kind is, between those who keep such a table."""
    x, values = 0, columns(table)
    knobs = dict.fromkeys(table.journey.knobs, x)
    payloads = {
        Kind.ENTER: Entrance(x, x, without_drafts(table), x),
        Kind.STOP: (x, x),
        Kind.KNOBS: (x, knobs, knobs),
        Kind.SCHEDULE: Schedule(x, x, x),
        Kind.HAND: Parcel(x, x, x, x, x, Standing.of(table), values, x),
        Kind.NEWS: (x, News(x, x, x, values, Counts(x, x, x, x, x), x)),
    }
    return PLAIN | {kind: jax.tree.structure(payload) for kind, payload in payloads.items()}
