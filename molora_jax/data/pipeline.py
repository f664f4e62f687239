"""Sources of documents to batches: mixed, shuffled anew each epoch, sharded by host, packed, and resumable.

The order of the documents is a `grain.MapDataset`; the packing on top of it is a function of that order alone. So the
batches depend on nothing but the arguments, and a position in them is a few integers.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from molora_jax.config import UserError
from molora_jax.data.batch import Batch
from molora_jax.data.document import Document, Source, too_long
from molora_jax.data.packing import Bins, assemble

State = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """How documents become batches.

    Attributes:
      rows: B, rows of a batch on this host.
      length: T, tokens of a row.
      seed: of the shuffles.
      weights: share of each source in the mixture, by name; even when None.
      epochs: how often each source is gone through; the batches end when the first source has been. None: without end.
      shuffle: another random order in each epoch, instead of the sources' own.
      packed: rows hold as many documents as fit, instead of one.
      window: batches that are packed at a time; more waste less room and take longer to begin.
      process_index, process_count: this host takes each `process_count`-th document of the order, from the
        `process_index`-th on.
    """

    rows: int
    length: int
    seed: int
    weights: Mapping[str, float] | None = None
    epochs: int | None = None
    shuffle: bool = True
    packed: bool = True
    window: int = 8
    process_index: int = 0
    process_count: int = 1

    def __post_init__(self):
        if self.rows < 1 or self.length < 2 or self.window < 1:
            raise UserError(f"pipeline: got {self.rows} rows of {self.length} tokens, expected at least 1 row of 2")
        if self.epochs is not None and self.epochs < 1:
            raise UserError(f"pipeline: got {self.epochs} epochs, expected a positive number, or None for no end")
        if not 0 <= self.process_index < self.process_count:
            raise UserError(
                f"pipeline: got process {self.process_index} of {self.process_count}, expected 0 to count-1"
            )
        if self.epochs is not None and self.process_count > 1:
            raise UserError("pipeline: with epochs the hosts would run out at different steps; stop by steps instead")


class Batches(Iterator[Batch]):
    """The batches of some sources, one after the other.

    The last batch of a finite pipeline is filled up with empty rows.

    Args:
      sources: by name; each has documents by index.
      spec: what to do with them.

    Raises:
      UserError: grain is missing, no source, an empty one, or weights that do not go with the sources; while
        iterating, a document that does not fit in a row.
    """

    def __init__(self, sources: Mapping[str, Source[Document]], spec: Spec):
        self._spec = spec
        self._order = _order(sources, spec)
        self._documents = iter(self._order.to_iter_dataset(_read_options()))
        self._identity = _identity(sources, spec)
        self._held: list[tuple[int, Document]] = []
        self._begin: tuple[State, list[int]] = (self._documents.get_state(), [])
        self._rows: list[list[Document]] = []
        self._emitted = 0

    def __next__(self) -> Batch:
        at = self._emitted * self._spec.rows
        if at >= len(self._rows):
            self._fill()
            at = 0
        if not self._rows:
            raise StopIteration
        self._emitted += 1
        return assemble(self._rows[at : at + self._spec.rows], self._spec.length)

    def _fill(self) -> None:
        """Packs the next window. What finds no room is held back and goes first into the window after it."""
        self._begin = (self._documents.get_state(), [index for index, _ in self._held])
        bins = Bins(self._spec.rows * self._spec.window, self._spec.length, packed=self._spec.packed)
        self._held = [pair for pair in self._held if not bins.put(pair[1])]
        waiting = sum(len(document) for _, document in self._held)
        while waiting < bins.room and (pair := next(self._documents, None)) is not None:
            if len(pair[1]) > self._spec.length:
                raise UserError(f"pipeline: {pair[1].id} {too_long(pair[1], self._spec.length)}; raise the length")
            if not bins.put(pair[1]):
                self._held.append(pair)
                waiting += len(pair[1])
        used = [row for row in bins.rows if row]
        self._rows, self._emitted = used + [[] for _ in range(-len(used) % self._spec.rows)], 0

    def get_state(self) -> State:
        """Where the next batch comes from, as JSON values; small, whatever the size of the sources."""
        documents, held = self._begin
        return dict(documents=documents, held=held, emitted=self._emitted, identity=self._identity)

    def set_state(self, state: State) -> None:
        """Goes to where `get_state` was called; the batches from there on are the same.

        Raises:
          UserError: the state is of other sources or of another spec.
        """
        if state.get("identity") != self._identity:
            raise UserError("pipeline: the saved position is of other data or settings; resume with those of the run")
        self._documents.set_state(state["documents"])
        self._held = [self._order[index] for index in state["held"]]
        self._rows, self._emitted = [], 0
        self._begin = (state["documents"], list(state["held"]))
        if state["emitted"]:
            self._fill()
            self._emitted = state["emitted"]


def _grain():
    try:
        import grain  # only here: it takes a second to import, and only training needs it
    except ImportError:
        raise UserError("pipeline: the package grain is missing; pip install 'molora_jax[train]'") from None
    return grain


def _read_options():
    """One thread prepares documents while the model runs."""
    return _grain().ReadOptions(num_threads=1, prefetch_buffer_size=256)


def _order(sources: Mapping[str, Source[Document]], spec: Spec):
    """A MapDataset of (index in the order, document)."""
    shares = dict.fromkeys(sources, 1.0) if spec.weights is None else dict(spec.weights)
    if not sources or set(shares) != set(sources) or min(shares.values()) <= 0:
        raise UserError(
            f"pipeline: got weights {shares} for the sources {sorted(sources)}, expected a positive one each"
        )
    for name, source in sources.items():
        if not len(source):
            raise UserError(f"pipeline: the source {name} is empty; check its file and filters")
    grain, parts = _grain(), []
    for number, name in enumerate(sources):
        part = grain.MapDataset.source(sources[name])
        if spec.shuffle:
            part = part.shuffle(_seed(spec.seed, number))
        parts.append(part.repeat(spec.epochs))
    mixed = parts[0] if len(parts) == 1 else grain.MapDataset.mix(parts, [shares[name] for name in sources])
    shard = mixed[spec.process_index :: spec.process_count] if spec.process_count > 1 else mixed
    return shard.map_with_index(lambda index, document: (index, document))


def _seed(seed: int, number: int) -> int:
    """Another one for each source, so that equal sources do not go in step."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=4).digest(), "big") >> 1


def _identity(sources: Mapping[str, Source[Document]], spec: Spec) -> str:
    """A hash of the spec and of the sources' names, sizes and first elements."""
    facts = {name: (len(source), source[0].id, source[0].tokens.tolist()) for name, source in sources.items()}
    settings = dataclasses.asdict(spec) | {"weights": spec.weights and dict(spec.weights)}
    return hashlib.blake2b(json.dumps([list(facts.items()), settings]).encode(), digest_size=8).hexdigest()
