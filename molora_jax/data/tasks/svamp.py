"""SVAMP (Patel et al. 2021): arithmetic stories of one operation, a challenge set without a training part.

Elements of the official JSON array: `ID`, `Body`, `Question`, `Equation`, `Answer` (a number), `Type`.
"""

from typing import Any

from molora_jax.data.example import Example
from molora_jax.data.rows import RowError, field
from molora_jax.data.tasks import answers
from molora_jax.data.tasks.gsm8k import MATHS
from molora_jax.data.tasks.task import Task


def _convert(row: Any, id: str, split: str) -> Example:
    body, question = field(row, "Body", str).strip(), field(row, "Question", str).strip()
    value = field(row, "Answer", (int, float))
    if value != value or value in (float("inf"), -float("inf")):
        raise RowError(f"'Answer' is {value}, expected a finite number")
    answer = str(int(value)) if value == int(value) else str(value)
    body += "" if body.endswith((".", "?", "!", ",")) else "."
    return Example(
        id=f"svamp/{field(row, 'ID', str)}",
        task="svamp",
        prompt=f"{body} {question}\n\n{answers.INSTRUCTION}\n",
        completion=answers.worked(field(row, "Equation", str), answer),
        answer=answer,
        split=split,
    )


SVAMP = Task(name="svamp", files={"test": ["maths/SVAMP.json"]}, convert=_convert, judge=MATHS)
