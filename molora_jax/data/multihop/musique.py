"""MuSiQue-Ans (Trivedi et al. 2022) in its official form.

Rows of the JSONL: `id` such as `3hop1__1_2_3`, `question`, `answer`, `answer_aliases`, `paragraphs` of `title`,
`paragraph_text` and `is_supporting`, and `question_decomposition`. Its paragraphs are not cut into sentences.
"""

import re
from typing import Any

from molora_jax.data.multihop.question import Question, Segment
from molora_jax.data.rows import RowError, field, texts


def hops_of(kind: str) -> int:
    """Hops of a kind of question such as `2hop` or `3hop1`."""
    found = re.match(r"(\d)hop", kind)
    if not found:
        raise RowError(f"got the kind of question {kind!r:.40}, expected something like 2hop or 3hop1")
    return int(found[1])


def convert(row: Any, *, split: str) -> Question:
    """A question; those that MuSiQue-Full marks as unanswerable are malformed here."""
    id = field(row, "id", str)
    if not row.get("answerable", True):
        raise RowError("it is not answerable; take the file of MuSiQue-Ans")
    segments = tuple(
        Segment(
            title=field(p, "title", str, " of a paragraph"),
            sentences=(field(p, "paragraph_text", str, " of a paragraph"),),
            supporting=field(p, "is_supporting", bool, " of a paragraph"),
        )
        for p in field(row, "paragraphs", list)
    )
    if not any(segment.supporting for segment in segments):
        raise RowError("no paragraph is supporting")
    kind = id.split("__")[0]
    return Question(
        id=id,
        dataset="musique",
        split=split,
        question=field(row, "question", str),
        answer=field(row, "answer", str),
        aliases=texts(row, "answer_aliases"),
        type=kind,
        hops=hops_of(kind),
        segments=segments,
    )
