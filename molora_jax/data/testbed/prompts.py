"""Problems to prompts and worked completions: one domain, several after each other, or interleaved.

marked       `calc:47 +38 *3`                         solved by `47+38=85;85*3=55 ->55`
bare         `47 +38 *3`                              the same; the operands tell the domain
several      `calc:47 +38 | text: k f m, rev`         `47+38=85 ->85 | rev: m f k -> m f k`
interleaved  `47 +38 | k f m, rev | *3 |, drop`       `47+38=85 | rev: m f k |85*3=55 | drop: m f ->55 -> m f`

Every prompt ends with a line break. Interleaved problems take turns within the sentence, an operation each, and the
solution takes the same turns.
"""

from collections.abc import Iterable, Sequence

from molora_jax.data.example import Example, Span
from molora_jax.data.testbed.problem import Problem

ARROW, BAR, END = " ->", " |", "\n"

Piece = tuple[str, str]
"""(text, domain)"""


def write(
    problems: Sequence[Problem], *, id: str, split: str, markers: bool = True, interleaved: bool = False
) -> Example:
    """The prompt of one or more problems, with the worked completion and the span of every domain.

    Args:
      markers: begin each problem with the name of its domain.
      interleaved: take turns operation by operation; all problems must have the same number of operations.
    """
    start = [f"{p.domain}:" * markers + p.start for p in problems]
    if interleaved:
        asked = _turns(problems, [(s + p.asked[0], *p.asked[1:]) for s, p in zip(start, problems, strict=True)])
        worked = _turns(problems, [p.worked for p in problems])
        worked += [(ARROW + p.answer, p.domain) for p in problems]
    else:
        asked = [(s + "".join(p.asked), p.domain) for s, p in zip(start, problems, strict=True)]
        worked = [(";".join(p.worked) + ARROW + p.answer, p.domain) for p in problems]
        asked, worked = _barred(asked), _barred(worked)
    prompt = "".join(text for text, _ in asked) + END
    pieces = [*asked[:-1], (asked[-1][0] + END, asked[-1][1]), *worked]
    return Example(
        id=id,
        task="+".join(p.domain for p in problems),
        prompt=prompt,
        completion="".join(text for text, _ in worked),
        answer=joined(p.answer for p in problems),
        split=split,
        level=max(p.level for p in problems),
        spans=tuple(_spans(pieces)),
    )


def joined(answers: Iterable[str]) -> str:
    """The answers of all problems of a prompt as one."""
    return f"{BAR} ".join(answer.strip() for answer in answers)


def _turns(problems: Sequence[Problem], parts: Sequence[Sequence[str]]) -> list[Piece]:
    return _barred(
        [(part, p.domain) for turn in zip(*parts, strict=True) for part, p in zip(turn, problems, strict=True)]
    )


def _barred(pieces: list[Piece]) -> list[Piece]:
    """Ends each piece but the last with a bar."""
    return [*((text + BAR, domain) for text, domain in pieces[:-1]), pieces[-1]]


def _spans(pieces: Iterable[Piece]) -> Iterable[Span]:
    at = 0
    for text, domain in pieces:
        yield Span(start=at, stop=at + len(text), domain=domain)
        at += len(text)
