"""A question whose evidence lies in some of several segments: one form for every multi-hop data set."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """A candidate for evidence: a paragraph, or a statement of a story.

    Attributes:
      title: what it is about; empty where the data set gives none.
      sentences: as the data set cuts them, white space included.
      supporting: whether the answer needs it.
      supporting_sentences: indices of the sentences that the answer needs, where the data set marks sentences.
    """

    title: str
    sentences: tuple[str, ...]
    supporting: bool
    supporting_sentences: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """All sentences in one string, single spaces between them."""
        return " ".join(" ".join(self.sentences).split())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question over segments.

    Attributes:
      id: the data set's own.
      dataset: `hotpotqa`, `2wikimultihopqa`, `musique`, `babi` or `facts`.
      split: the data set's own name of it: `train`, `dev`, `test`.
      question, answer: texts.
      aliases: other answers that count as right.
      type: the data set's own kind of question.
      hops: facts that the answer needs.
      segments: G candidates, in the data set's order.
      supporting_facts: (title, sentence) pairs as the file gives them, which official scores compare; a few of them
        name sentences that the paragraph does not have.
      evidences: (subject, relation, object) triples of 2WikiMultiHopQA.
      reasoning: worked solution, where there is one.
    """

    id: str
    dataset: str
    split: str
    question: str
    answer: str
    aliases: tuple[str, ...] = ()
    type: str = ""
    hops: int
    segments: tuple[Segment, ...]
    supporting_facts: tuple[tuple[str, int], ...] = ()
    evidences: tuple[tuple[str, str, str], ...] = ()
    reasoning: str = ""

    @property
    def supporting(self) -> tuple[int, ...]:
        """Indices of the segments that the answer needs."""
        return tuple(i for i, segment in enumerate(self.segments) if segment.supporting)
