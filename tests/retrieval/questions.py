"""Small questions for the tests of retrieval."""

import json

from molora_jax.data.multihop.question import Question, Segment


class Letters:
    """A tokenizer of letters: ids 1 to 40, with 3 in front of a text."""

    eos = (2,)

    def encode(self, text, *, special=True):
        return [3] * special + [1 + ord(letter) % 40 for letter in text]

    def decode(self, ids):
        return "".join(chr(96 + i) for i in ids)


def normalised(path, split: str, count: int, dataset="musique", candidates=5) -> None:
    """A file of questions whose first and last segments are evidence, which the question names."""
    rows = []
    for i in range(count):
        names = [f"N{(7 * i + 3 * j) % 50}" for j in range(candidates)]
        texts = [f"{names[j]} met {names[(j + 1 + i) % candidates]}." for j in range(candidates)]
        texts[0] = f"{names[0]} met {names[-1]}."
        paragraphs = [
            dict(idx=j, title=names[j], sentences=[texts[j]], is_supporting=j in (0, candidates - 1))
            for j in range(candidates)
        ]
        rows.append(
            dict(id=f"2hop__{split}{i}", dataset=dataset, split=split, question=f"Who did {names[0]} meet?",
                 answer=names[-1], type="2hop", paragraphs=paragraphs)
        )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


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
