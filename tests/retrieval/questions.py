"""Small questions for the tests of retrieval."""

from molora_jax.data.multihop.question import Question, Segment


def question(dataset="musique", answer="Cleo", aliases=(), support=(0, 2), count=4, hops=None, **fields) -> Question:
    segments = tuple(
        Segment(title=f"T{i}", sentences=(f"text {i}",), supporting=i in support, supporting_sentences=())
        for i in range(count)
    )
    return Question(
        id="q",
        dataset=dataset,
        split="dev",
        question="Who?",
        answer=answer,
        aliases=aliases,
        hops=len(support) if hops is None else hops,
        segments=segments,
        **fields,
    )
