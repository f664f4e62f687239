"""Answers from chosen segments: the published prompt, greedy or beam decoding, official scores, and cost."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.library import Library
from molora_jax.checkpoints.model import Model
from molora_jax.config import UserError
from molora_jax.data.multihop.question import Question
from molora_jax.engine import beams
from molora_jax.retrieval import metrics
from molora_jax.retrieval.metrics import Score
from molora_jax.retrieval.slates import passage

ROWS = 4
"""Questions that are answered together."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model said.

    Attributes:
      text: the first line of it.
      prefill, decode: tokens × layers that it took to read the prompt, and to write by all beams, also those that were
        given up.
    """

    text: str
    prefill: int
    decode: int


def prompt(question: Question, chosen: Sequence[int]) -> str:
    """`Context:` with the chosen segments in the order given, `Query:`, and `Answer:` (Dokme & Heck 2026)."""
    texts = [passage(s.title, s.text) for s in (question.segments[i] for i in chosen)]
    return "\n\n".join(["Context:\n" + "\n\n".join(texts), f"Query: {question.question}", "Answer:"])


def first_line(text: str) -> str:
    """What an answer is cut to; cutting at `, the ` or at `, who ` too, as published, damages answers with a comma."""
    return text.strip().partition("\n")[0].strip()


def answers(
    model: Model,
    prompts: Sequence[str],
    *,
    width: int = 4,
    max_new_tokens: int = 32,
    reader: Adapter | None = None,
    cut: Callable[[str], str] = first_line,
    progress: Callable[..., Iterable] = lambda parts, **_: parts,
) -> list[Answer]:
    """The best continuation of each prompt by beam search; `width` 1 is greedy.

    Args:
      reader: an adapter that all tokens have.
      cut: makes an answer of a continuation.

    Raises:
      UserError: a prompt that is longer than the model reads.
    """
    rows = [model.tokenizer.encode(text) for text in prompts]
    most = model.cfg.max_positions - max_new_tokens
    if rows and (longest := max(map(len, rows))) > most:
        raise UserError(f"answer: got a prompt of {longest} tokens, expected at most {most}: take fewer segments")
    adapted = {} if reader is None else dict(bank=Library.holding([reader], model.params).bank, expert=0)
    found, parts = [], [rows[i : i + ROWS] for i in range(0, len(rows), ROWS)]
    for part in progress(parts, total=len(parts)):
        how = dict(beams=width, max_new_tokens=max_new_tokens, stops=model.tokenizer.eos, **adapted)
        for row, kept in zip(part, beams.search(model.cfg, model.params, part, **how), strict=True):
            text = model.tokenizer.decode(kept[0].tokens)
            spent = model.cfg.layers * width * kept[0].passes
            found.append(Answer(cut(text), model.cfg.layers * len(row), spent))
    return found


def scores(questions: Sequence[Question], given: Sequence[Answer]) -> list[Score]:
    """EM, F1, precision and recall of each answer, by the rules of its set."""
    return [metrics.answer(question, one.text) for question, one in zip(questions, given, strict=True)]


def evidence(questions: Sequence[Question], chosen: Sequence[Sequence[int]]) -> list[Score]:
    """EM and F1 of the segments that were given to the reader."""
    return [metrics.paragraphs(question, picked) for question, picked in zip(questions, chosen, strict=True)]


def contexts(
    mode: str, questions: Sequence[Question], rankings: Sequence[Sequence[int]], k: int
) -> list[tuple[int, ...]]:
    """The segments each prompt holds: `all`, `gold`, `top` (the first k, best first), or `oracle`, gold filled up to k.

    Raises:
      UserError: another mode.
    """
    if mode not in ("all", "gold", "top", "oracle"):
        raise UserError(f"answer: got mode {mode!r}, expected all, gold, top or oracle")
    found = []
    for question, ranking in zip(questions, rankings, strict=True):
        gold, everything = question.supporting, tuple(range(len(question.segments)))
        rest = tuple(i for i in ranking if i not in gold)
        oracle = (*gold, *rest[: max(k - len(gold), 0)])
        found.append(dict(all=everything, gold=gold, top=tuple(ranking[:k]), oracle=oracle)[mode])
    return found
