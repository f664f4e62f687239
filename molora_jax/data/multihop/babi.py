"""bAbI (Weston et al. 2015), tasks 1 to 3: questions whose evidence is one to three statements of a story.

Lines of the official files: `4 John went to the kitchen.` or `7 Where is the football? <tab>garden<tab>3 6`, where the
last column numbers the supporting lines. Numbers begin again at 1 with each story. The segments of a question are the
statements before it.
"""

import pathlib
import re

from molora_jax.data.multihop.question import Question, Segment
from molora_jax.data.rows import Report, RowError, read


class _Story:
    """The statements up to the line that is being read."""

    def __init__(self, kind: str, split: str, stem: str):
        self._kind, self._split, self._stem = kind, split, stem
        self._statements: dict[int, str] = {}

    def convert(self, columns: list[str], line: int) -> Question | str:
        """A question, or the statement of a line that is none."""
        number, space, text = columns[0].partition(" ")
        if not (number.isdecimal() and space and text.strip()):
            raise RowError("expected a number, a space and a sentence")
        if int(number) == 1:
            self._statements = {}
        if len(columns) == 1:
            self._statements[int(number)] = text.strip()
            return text
        if len(columns) != 3 or not re.fullmatch(r"\d+( \d+)*", columns[2].strip()):
            raise RowError("expected a question, its answer and the numbers of its supporting lines, between tabs")
        return self._question(line, text.strip(), columns[1].strip(), {int(n) for n in columns[2].split()})

    def _question(self, line: int, text: str, answer: str, support: set[int]) -> Question:
        if missing := support - set(self._statements):
            raise RowError(f"its supporting line {min(missing)} is not in the story")
        return Question(
            id=f"babi/{self._stem}/{line}",
            dataset="babi",
            split=self._split,
            question=text,
            answer=answer,
            type=self._kind,
            hops=len(support),
            segments=tuple(
                Segment(
                    title="", sentences=(said,), supporting=n in support, supporting_sentences=(0,) * (n in support)
                )
                for n, said in self._statements.items()
            ),
        )


def load(path: pathlib.Path, split: str, report: Report, *, strict: bool) -> list[Question]:
    """The questions of a file; the report counts its lines."""
    found = re.search(r"qa\d+", path.stem)
    story = _Story(found[0] if found else "", split, path.stem)
    return [q for q in read(path, story.convert, report, strict=strict) if isinstance(q, Question)]
