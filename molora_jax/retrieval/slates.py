"""What a router reads of a question, and batches of it: a slate is a question's candidates with all that is known.

The inputs are computed once and kept, so that training a router over them is a matter of minutes.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from molora_jax.config import UserError
from molora_jax.data.multihop.question import Question
from molora_jax.retrieval import channels
from molora_jax.retrieval.encode import Encoder, Encoding, Job
from molora_jax.retrieval.sentence import SentenceEncoder
from molora_jax.typing import Bool, Float

JOBS = 8
"""Questions whose segments are encoded together."""


@dataclasses.dataclass(frozen=True)
class Slate:
    """One question's candidates.

    Attributes:
      encodings: [G D]; or a segment's tokens [T D] each, for a router that pools them.
      channels, links: beside them, of width 0 where there are none (`retrieval.channels`).
    """

    id: str
    gold: Bool[np.ndarray, "G"]
    encodings: Float[np.ndarray, "G D"] | tuple[Float[np.ndarray, "T D"], ...]
    channels: Float[np.ndarray, "G F"]
    links: Float[np.ndarray, "G G C"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["encodings", "read", "valid", "gold", "channels", "links"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Slates:
    """A batch of them.

    Attributes:
      encodings: [B G D], or [B G T D] of tokens.
      read: which of the tokens there are, [B G T]; None of pooled encodings.
      valid: false at pads.
      gold: which candidates are evidence.
      channels, links: None where there are none.
    """

    encodings: Float[np.ndarray, "B G *T D"]
    read: Bool[np.ndarray, "B G T"] | None
    valid: Bool[np.ndarray, "B G"]
    gold: Bool[np.ndarray, "B G"]
    channels: Float[np.ndarray, "B G F"] | None
    links: Float[np.ndarray, "B G G C"] | None

    @property
    def tokens(self) -> np.ndarray:
        """What a training step counts the rows of a batch by."""
        return self.valid


def jobs(questions: Iterable[Question]) -> list[Job]:
    """What an encoder is given of each: `title: text` of its segments."""
    return [Job(q.question, [passage(s.title, s.text) for s in q.segments]) for q in questions]


def passage(title: str, text: str) -> str:
    return f"{title}: {text}" if title else text


def encode(
    encoder: Encoder, questions: Sequence[Question], progress: Callable[..., Iterable] = lambda chunks, **_: chunks
) -> list[Encoding]:
    """Encodings of the questions' segments; `progress` may wrap the iteration (tqdm does)."""
    found, todo = [], jobs(questions)
    chunks = [todo[i : i + JOBS] for i in range(0, len(todo), JOBS)]
    for chunk in progress(chunks, total=len(chunks)):
        found += encoder.encode(chunk)
    return found


def slate(question: Question, pooled: Float[np.ndarray, "G D"] | tuple, beside: "Beside") -> Slate:
    """A question's slate from its encodings."""
    gold = np.array([segment.supporting for segment in question.segments])
    return Slate(question.id, gold, pooled, *beside.of(question))


class Beside:
    """Computes the channels and links of questions.

    Args:
      lexical: word overlap.
      dense: an encoder whose similarities are added; None for none.
    """

    def __init__(self, *, lexical: bool, dense: SentenceEncoder | None = None):
        self.lexical, self.dense = lexical, dense
        self.channels = len(channels.LEXICAL) * lexical + len(channels.DENSE) * (dense is not None)
        self.links = len(channels.LEXICAL_LINKS) * lexical + len(channels.DENSE_LINKS) * (dense is not None)

    def of(self, question: Question) -> tuple[Float[np.ndarray, "G F"], Float[np.ndarray, "G G C"]]:
        count = len(question.segments)
        own, pairs = [np.zeros((count, 0), np.float32)], [np.zeros((count, count, 0), np.float32)]
        if self.lexical:
            own.append(channels.lexical(question))
            pairs.append(channels.lexical_links(question))
        if self.dense is not None:
            query, *segments = self.dense.embed([question.question, *jobs([question])[0].segments])
            own.append(channels.dense(query, np.array(segments)))
            pairs.append(channels.dense_links(np.array(segments)))
        return np.concatenate(own, axis=-1), np.concatenate(pairs, axis=-1)


def collate(slates: Sequence[Slate], count: int, length: int = 0) -> Slates:
    """A batch with `count` candidates each, and `length` tokens each where they are not pooled; the rest is padding.

    Raises:
      UserError: a slate with more candidates.
    """
    if (most := max(len(slate.gold) for slate in slates)) > count:
        raise UserError(f"router: got {most} candidates, expected at most {count}")
    first, rows = slates[0], len(slates)
    pooled = isinstance(first.encodings, np.ndarray)
    width = (first.encodings if pooled else first.encodings[0]).shape[-1]
    encodings = np.zeros((rows, count, *(() if pooled else (length,)), width), np.float32)
    read = None if pooled else np.zeros((rows, count, length), bool)
    valid, gold = np.zeros((rows, count), bool), np.zeros((rows, count), bool)
    own = np.zeros((rows, count, first.channels.shape[-1]), np.float32)
    pairs = np.zeros((rows, count, count, first.links.shape[-1]), np.float32)
    for b, slate in enumerate(slates):
        g = len(slate.gold)
        valid[b, :g], gold[b, :g], own[b, :g], pairs[b, :g, :g] = True, slate.gold, slate.channels, slate.links
        if pooled:
            encodings[b, :g] = slate.encodings
            continue
        for i, tokens in enumerate(slate.encodings):
            encodings[b, i, : len(tokens)], read[b, i, : len(tokens)] = tokens[:length], True
    given = lambda array: array if array.shape[-1] else None
    return Slates(encodings, read, valid, gold, given(own), given(pairs))
