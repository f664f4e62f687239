"""One JSONL form for several data sets.

Rows: `id`, `dataset`, `split`, `question`, `answer`, `paragraphs` of `title`, `sentences` and `is_supporting`; where
there are any, `answer_aliases`, `type`, `supporting_facts`, `evidences`, and `cot`, a worked solution.
"""

from typing import Any

from molora_jax.data.multihop.musique import hops_of
from molora_jax.data.multihop.question import Question, Segment
from molora_jax.data.multihop.wikipedia import pairs, triples
from molora_jax.data.rows import RowError, field, texts


def convert(row: Any, *, split: str | None) -> Question | None:
    """A question; None for one of another split than the one asked for."""
    if field(row, "split", str) != split and split is not None:
        return None
    facts = pairs(row, "supporting_facts") if "supporting_facts" in row else ()
    segments = tuple(_segment(paragraph, facts) for paragraph in field(row, "paragraphs", list))
    support = sum(segment.supporting for segment in segments)
    if not support:
        raise RowError("no paragraph is supporting")
    dataset, kind = field(row, "dataset", str), row.get("type")
    kind = "" if kind is None else field(row, "type", str)
    return Question(
        id=field(row, "id", str),
        dataset=dataset,
        split=row["split"],
        question=field(row, "question", str),
        answer=field(row, "answer", str),
        aliases=texts(row, "answer_aliases") if "answer_aliases" in row else (),
        type=kind,
        hops=hops_of(kind) if dataset == "musique" and kind else support,
        segments=segments,
        supporting_facts=facts,
        evidences=triples(row, "evidences") if "evidences" in row else (),
        reasoning=field(row, "cot", str) if "cot" in row else "",
    )


def _segment(paragraph: Any, facts: tuple[tuple[str, int], ...]) -> Segment:
    title = field(paragraph, "title", str, " of a paragraph")
    sentences = texts(paragraph, "sentences", " of a paragraph")
    return Segment(
        title=title,
        sentences=sentences,
        supporting=field(paragraph, "is_supporting", bool, " of a paragraph"),
        supporting_sentences=tuple(sorted({i for t, i in facts if t == title and 0 <= i < len(sentences)})),
    )
