"""A subserver among others whose models have tokenizers of their own: what is handed over is text.

An answer is the list of its tokens, each in the ids of the model that wrote it. A model that gets the turn again keeps
what it has read, and reads anew, in its own tokens, the text from there on: from the last place that it had read to and
where a character was whole.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.engine.blueprint import Blueprint, Model
from molora_jax.engine.fused import Counts
from molora_jax.engine.handover import Parcel, Standing, columns
from molora_jax.engine.messages import FRONT, Entrance, Kind, Message, News
from molora_jax.engine.subserver import Post, Subserver
from molora_jax.nn.layout import NOWHERE
from molora_jax.routing.characters import WHOLE
from molora_jax.typing import Int, Params


class Interpreter(Protocol):
    """What several tokenizers make of each other's texts; (writer, token) pairs are of an answer."""

    def encode(self, model: int, written: Sequence[tuple[int, int]]) -> list[int]:
        """The text of some tokens, from a whole character on, in the ids of `model`."""

    def after(self, state: int, writer: int, token: int) -> int:
        """Where in a character the text ends after one more token; `WHOLE` where it does not."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TextParcel:
    """k requests on their way to a subserver of another tokenizer; numpy arrays.

    Attributes:
      number, slot, standing: as in `handover.Parcel`; what it says of lengths is in the sender's tokens.
      start, count: of the tokens of the answer that are sent, `start` and the `count` from there on.
      tokens, writers: those, each in the ids of its writer.
      seen: how many of the answer's tokens each model's subserver knows.
    """

    number: Int[np.ndarray, "k"]
    slot: Int[np.ndarray, "k"]
    standing: Standing
    start: Int[np.ndarray, "k"]
    count: Int[np.ndarray, "k"]
    tokens: Int[np.ndarray, "k n"]
    writers: Int[np.ndarray, "k n"]
    seen: Int[np.ndarray, "k M"]


@dataclasses.dataclass
class Book:
    """What a subserver knows of a request's text.

    Attributes:
      tokens: in its own ids, those that stay as they are, whatever text follows.
      at: how many of the answer's tokens they hold.
      answer: (writer, token) of all tokens that it has heard of.
      most: tokens that the answer may have.
      seen: how many of them each model's subserver knows.
    """

    tokens: list[int]
    at: int
    answer: list[tuple[int, int]]
    most: int
    seen: np.ndarray

    def settle(
        self, entered: list[int], interpreter: Interpreter, index: int, written: Sequence[int], read: int
    ) -> None:
        """Adds what model `index` wrote after the tokens `entered`, and keeps what of it is read and whole.

        The text before the visit was whole, or it would not have got the turn.

        Args:
          read: how many of the `written` tokens it has read too.
        """
        state, keep = WHOLE, 0
        for n, token in enumerate(written[:read], 1):
            state = interpreter.after(state, index, token)
            keep = n if state == WHOLE else keep
        self.tokens = [*entered, *written[:keep]]
        self.at = len(self.answer) + keep
        self.answer += [(index, token) for token in written]
        self.seen[index] = len(self.answer)


class TranslatingSubserver(Subserver):
    """A subserver that takes and gives text."""

    def __init__(
        self, index: int, blueprint: Blueprint, model: Model, params: Params, device, interpreter: Interpreter
    ):
        """`params` are the program's."""
        super().__init__(index, blueprint, model, params, device)
        self._interpreter = interpreter
        self._books: dict[int, Book] = {}
        self._entered: dict[int, list[int]] = {}  # of each slot, all its tokens when it got the turn
        self._outbox: list[Post] = []

    def warm_up(self) -> None:
        super().warm_up()
        assert self._limits

    def _on_enter(self, entrance: Entrance) -> None:
        super()._on_enter(entrance)
        slot, length = int(entrance.slot), int(entrance.row.length)
        models = len(self.blueprint.fleet.cfgs)
        prompt, most = entrance.row.tokens[:length].tolist(), int(entrance.row.limit) - length
        self._books[slot] = Book(prompt, 0, [], most, np.zeros(models, np.int32))
        self._entered[slot] = list(prompt)

    def _on_hand(self, parcel: TextParcel) -> None:
        here = np.flatnonzero(self._numbers[parcel.slot] == parcel.number)  # others were aborted on their way
        rows = [row for row in here if self._reads(parcel, row)]
        if not rows:
            return
        parcel = jax.tree.map(lambda leaf: leaf[rows], parcel)
        known = np.array([len(self._books[slot].tokens) for slot in parcel.slot], np.int32)
        length = np.array([len(self._entered[slot]) for slot in parcel.slot], np.int32)
        super()._on_hand(self._parcel(parcel, known, length))
        left = np.array([self._books[slot].most - len(self._books[slot].answer) for slot in parcel.slot])
        limit = np.minimum(length + left, self.config.max_length).astype(np.int32)
        self._table = self._limits(self._table, self._padded(parcel.slot, -1), self._padded(limit))

    def _reads(self, parcel: TextParcel, row: int) -> bool:
        """Takes in a text; if its request has become too long for this model, it ends."""
        slot, count = int(parcel.slot[row]), parcel.count[row]
        book = self._books[slot]
        told = zip(parcel.writers[row, :count].tolist(), parcel.tokens[row, :count].tolist(), strict=True)
        book.answer = [*book.answer[: parcel.start[row]], *told]
        book.seen = np.array(parcel.seen[row])
        book.seen[self.index] = len(book.answer)
        whole = book.tokens + self._interpreter.encode(self.index, book.answer[book.at :])
        self._entered[slot] = whole
        if len(whole) < self.config.max_length:
            return True
        self._outbox += self._given_up(slot)
        return False

    def _parcel(self, parcel: TextParcel, known: Int[np.ndarray, "k"], length: Int[np.ndarray, "k"]) -> Parcel:
        """The same in own tokens; other models count as having read them, so that only what follows is new to them."""
        suffixes = [self._entered[slot][start:] for slot, start in zip(parcel.slot, known, strict=True)]
        width = max(map(len, suffixes))
        tokens = np.array([ids + [0] * (width - len(ids)) for ids in suffixes], np.int32).reshape(len(suffixes), width)
        anchor = np.tile(length[:, None], (1, parcel.seen.shape[1]))
        anchor[:, self.index] = np.minimum(self._standing.anchor[parcel.slot, self.index], known)
        empty = {name: np.zeros(tokens.shape, leaf.dtype) for name, leaf in columns(self._table).items()}
        standing = dataclasses.replace(parcel.standing, length=length, anchor=anchor.astype(np.int32))
        who = parcel.number, parcel.slot, length
        drafts = np.zeros((len(length), 0, 0), np.float32)
        return Parcel(*who, known, length - known, standing, empty | dict(tokens=tokens), drafts)

    def _given_up(self, slot: int) -> Iterator[Post]:
        """Says to all that a request ends here."""
        number = self._numbers[slot].copy()
        self._vacate(np.array([slot]))
        ended = Message(Kind.STOP, (np.array([number]), np.array([slot])))
        yield from ((other, ended) for other in range(len(self.blueprint.fleet.cfgs)) if other != self.index)
        nothing = {name: np.zeros((1, 0), leaf.dtype) for name, leaf in columns(self._table).items()}
        counts = jax.device_get(Counts.zero(self.plan))
        news = News(np.array([number]), np.zeros(1, np.int32), np.ones(1, bool), nothing, counts, np.float64(0))
        yield FRONT, Message(Kind.NEWS, (np.int32(self.index), news))

    def patience(self) -> float | None:
        return 0.0 if self._outbox else super().patience()

    def run(self) -> list[Post]:
        """See `Subserver.run`; first it says what has ended for want of room."""
        said, self._outbox = self._outbox, []
        done = [] if said else super().run()
        for to, message in done:
            said.append((to, self._as_text(to, message.payload) if message.kind == Kind.HAND else message))
        return said

    def _as_text(self, to: int, parcel: Parcel) -> Message:
        starts, answers = [], []
        for row, slot in enumerate(parcel.slot.tolist()):
            book, entered = self._books[slot], self._entered[slot]
            read = int(parcel.standing.anchor[row, self.index]) - len(entered)
            written = parcel.columns["tokens"][row, : parcel.count[row]].tolist()
            book.settle(entered, self._interpreter, self.index, written, read)
            starts.append(int(book.seen[to]))
            answers.append(book.answer[starts[-1] :])
        count = np.array([len(answer) for answer in answers], np.int32)
        writers, tokens = np.zeros((2, len(answers), int(count.max())), np.int32)
        for row, answer in enumerate(answers):
            for n, (writer, token) in enumerate(answer):
                writers[row, n], tokens[row, n] = writer, token
        seen = np.array([self._books[slot].seen for slot in parcel.slot.tolist()])
        sent = (np.array(starts, np.int32), count, tokens, writers, seen)
        return Message(Kind.HAND, TextParcel(parcel.number, parcel.slot, parcel.standing, *sent))

    @functools.cached_property
    def _limits(self) -> jax.stages.Compiled:
        row = np.zeros(self.config.max_rows, np.int32)
        return self._compiled(_limited, self._table, row, row, donate=(0,))


def _limited(table, slots: Int[Any, "S"], limits: Int[Any, "S"]):
    to = jnp.where(slots >= 0, slots, NOWHERE)
    return dataclasses.replace(table, limit=table.limit.at[to].set(limits, mode="drop"))
