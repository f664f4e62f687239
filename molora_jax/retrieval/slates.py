"""What a router reads of a question, and batches of it: a slate is a question's candidates with all that is known.

The inputs are computed once and kept, so that training a router over them is a matter of minutes.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
import numpy as np
import safetensors.numpy

from molora_jax.config import UserError
from molora_jax.data.multihop.question import Question
from molora_jax.retrieval import channels, encode
from molora_jax.retrieval.channels import DENSE, DENSE_LINKS, LEXICAL, LEXICAL_LINKS
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


def encodings(
    encoder: Encoder, questions: Sequence[Question], progress: Callable[..., Iterable] = lambda chunks, **_: chunks
) -> list[Encoding]:
    """Encodings of the questions' segments; `progress` may wrap the iteration (tqdm does)."""
    found, todo = [], jobs(questions)
    chunks = [todo[i : i + JOBS] for i in range(0, len(todo), JOBS)]
    for chunk in progress(chunks, total=len(chunks)):
        found += encoder.encode(chunk)
    return found


class Beside:
    """Computes the channels and links of questions (`retrieval.channels`).

    Args:
      lexical: word overlap.
      dense: an encoder whose similarities are added; None for none.
      cache: folder in which they are kept, by the content of the question and the encoder; None keeps none.

    Attributes:
      channels, links: how many there are.
    """

    def __init__(self, *, lexical: bool = True, dense: SentenceEncoder | None = None, cache: Path | None = None):
        self.lexical, self.dense, self.cache = lexical, dense, cache
        self.channels = len(LEXICAL) * lexical + len(DENSE) * (dense is not None)
        self.links = len(LEXICAL_LINKS) * lexical + len(DENSE_LINKS) * (dense is not None)

    def of(self, questions: Sequence[Question]) -> list[tuple[Float[np.ndarray, "G F"], Float[np.ndarray, "G G C"]]]:
        """(channels, links) of each question."""
        paths = [self._path(question) for question in questions]
        new = [i for i, path in enumerate(paths) if path is None or not path.is_file()]
        found = dict(zip(new, self._compute([questions[i] for i in new]), strict=True))
        for i, path in enumerate(paths):
            if i not in found:
                kept = safetensors.numpy.load_file(path)
                found[i] = kept["channels"], kept["links"]
            elif path is not None:
                encode.keep(path, dict(zip(("channels", "links"), found[i], strict=True)))
        return [found[i] for i in range(len(questions))]

    def _path(self, question: Question) -> Path | None:
        if self.cache is None:
            return None
        parts = [
            f"{LEXICAL} {LEXICAL_LINKS}" if self.lexical else "",
            self.dense.digest if self.dense else "",
            question.question,
        ]
        parts += [text for segment in question.segments for text in (segment.title, segment.text)]
        key = hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
        return self.cache / f"{key}.channels.safetensors"

    def _compute(self, questions: Sequence[Question]):
        vectors = embedded(self.dense, questions) if self.dense is not None else [None] * len(questions)
        for question, known in zip(questions, vectors, strict=True):
            count = len(question.segments)
            own, pairs = [np.zeros((count, 0), np.float32)], [np.zeros((count, count, 0), np.float32)]
            if self.lexical:
                own.append(channels.lexical(question))
                pairs.append(channels.lexical_links(question))
            if known is not None:
                own.append(channels.dense(known[0], known[1:]))
                pairs.append(channels.dense_links(known[1:]))
            yield np.concatenate(own, axis=-1), np.concatenate(pairs, axis=-1)


def embedded(encoder: SentenceEncoder, questions: Sequence[Question]) -> list[Float[np.ndarray, "1+G D"]]:
    """Unit vectors of each question and, behind it, of its segments."""
    todo = jobs(questions)
    if not todo:
        return []
    vectors = encoder.embed([text for job in todo for text in (job.question, *job.segments)])
    return np.split(vectors, np.cumsum([1 + len(job.segments) for job in todo])[:-1])


def slates(questions: Sequence[Question], given: Sequence[np.ndarray | tuple], beside: Beside) -> list[Slate]:
    """The questions' slates from what stands for their segments: [G D], or tokens [T D] each."""
    gold = [np.array([segment.supporting for segment in question.segments]) for question in questions]
    own = zip(questions, gold, given, beside.of(questions), strict=True)
    return [Slate(question.id, support, vectors, *known) for question, support, vectors, known in own]


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
