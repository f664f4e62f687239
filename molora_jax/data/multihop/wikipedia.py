"""HotpotQA (distractor setting) and 2WikiMultiHopQA in their official form: context and support by title.

Elements of either JSON array: `_id`, `question`, `answer`, `type`, `context` as [title, sentences] pairs,
`supporting_facts` as [title, sentence] pairs; 2WikiMultiHopQA adds `evidences`, triples, and `answer_id`, by which its
file of aliases (JSONL of `Q_id`, `aliases`, `demonyms`) is looked up. A few supporting sentences of either set do not
exist in their paragraph: the pair is kept for the official scores, the paragraph counts as supporting.
"""

from collections.abc import Mapping
from typing import Any

from molora_jax.data.multihop.question import Question, Segment
from molora_jax.data.rows import RowError, field


def pairs(row: Any, key: str) -> tuple[tuple[str, int], ...]:
    """[title, sentence] pairs."""
    found = field(row, key, list)
    if not all(isinstance(p, list) and [type(x) for x in p] == [str, int] for p in found):
        raise RowError(f"{key!r} holds something that is no [title, number] pair")
    return tuple((title, sentence) for title, sentence in found)


def triples(row: Any, key: str) -> tuple[tuple[str, str, str], ...]:
    """[subject, relation, object] triples."""
    found = field(row, key, list)
    if not all(isinstance(t, list) and len(t) == 3 and all(isinstance(x, str) for x in t) for t in found):
        raise RowError(f"{key!r} holds something that is no [subject, relation, object] triple")
    return tuple((s, r, o) for s, r, o in found)


def supported(paragraphs: list[tuple[str, tuple[str, ...]]], facts: tuple[tuple[str, int], ...]) -> tuple[Segment, ...]:
    """The paragraphs, of which those count as supporting whose title a supporting fact names.

    Raises:
      RowError: no fact, or one that names no paragraph.
    """
    titles = {title for title, _ in paragraphs}
    missing = [title for title, _ in facts if title not in titles]
    if missing or not facts:
        what = f"the supporting title {missing[0]!r:.60} is not among the paragraphs" if missing else "no support"
        raise RowError(what)
    return tuple(
        Segment(
            title=title,
            sentences=sentences,
            supporting=any(title == t for t, _ in facts),
            supporting_sentences=tuple(sorted({i for t, i in facts if t == title and 0 <= i < len(sentences)})),
        )
        for title, sentences in paragraphs
    )


def convert(row: Any, *, dataset: str, split: str, aliases: Mapping[str, tuple[str, ...]]) -> Question:
    """A question of either set; `aliases` by `answer_id`."""
    paragraphs = []
    for paragraph in field(row, "context", list):
        if not (isinstance(paragraph, list) and len(paragraph) == 2 and isinstance(paragraph[0], str)):
            raise RowError("'context' holds something that is no [title, sentences] pair")
        title, sentences = paragraph
        if not (isinstance(sentences, list) and all(isinstance(s, str) for s in sentences)):
            raise RowError(f"the paragraph {title!r:.60} is no list of sentences")
        paragraphs.append((title, tuple(sentences)))
    facts = pairs(row, "supporting_facts")
    segments = supported(paragraphs, facts)
    return Question(
        id=field(row, "_id", str),
        dataset=dataset,
        split=split,
        question=field(row, "question", str),
        answer=field(row, "answer", str),
        aliases=aliases.get(row.get("answer_id"), ()),
        type=field(row, "type", str),
        hops=sum(segment.supporting for segment in segments),
        segments=segments,
        supporting_facts=facts,
        evidences=triples(row, "evidences") if "evidences" in row else (),
    )
