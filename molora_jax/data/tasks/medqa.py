"""MedQA (Jin et al. 2020), the four-choice questions of the United States' medical licensing examination.

Rows of the official JSONL: `question`, `options` from letter to text, `answer_idx`, and `answer`, the right text.
"""

from typing import Any

from molora_jax.data.example import Example
from molora_jax.data.rows import RowError, field
from molora_jax.data.tasks import choices
from molora_jax.data.tasks.task import Task


def _convert(row: Any, id: str, split: str) -> Example:
    options, key = field(row, "options", dict), field(row, "answer_idx", str)
    listed = [(letter, field(options, letter, str, " of 'options'")) for letter in sorted(options)]
    if (right := field(row, "answer", str)) != options.get(key, right):
        raise RowError(f"its answer is {right!r:.40}, but option {key} is {options[key]!r:.40}")
    question = field(row, "question", str)
    return choices.example(id=id, task="medqa", split=split, question=question, choices=listed, key=key)


MEDQA = Task(
    name="medqa",
    files={"train": ["medqa/US_4opt_train*.jsonl"], "test": ["medqa/US_4opt_test.jsonl"]},
    convert=_convert,
    judge=choices.LETTERS,
)
