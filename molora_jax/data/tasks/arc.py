"""ARC (Clark et al. 2018): school science with three to five choices, in a challenge and an easy set.

Rows of the official JSONL: `id`, `question` with `stem` and `choices` of `label` and `text`, `answerKey`. A few rows
number their choices 1 to 4 instead of lettering them.
"""

import functools
from typing import Any

from molora_jax.data.example import Example
from molora_jax.data.rows import field
from molora_jax.data.tasks import choices
from molora_jax.data.tasks.task import Task


def _convert(row: Any, id: str, split: str, *, task: str) -> Example:
    question = field(row, "question", dict)
    listed = [
        (field(choice, "label", str, " of a choice"), field(choice, "text", str, " of a choice"))
        for choice in field(question, "choices", list)
    ]
    return choices.example(
        id=f"{task}/{field(row, 'id', str)}",
        task=task,
        split=split,
        question=field(question, "stem", str),
        choices=listed,
        key=field(row, "answerKey", str),
    )


def _task(name: str, folder: str) -> Task:
    splits = dict(train="Train", validation="Dev", test="Test")
    return Task(
        name=name,
        files={split: [f"arc/{folder}-{part}.jsonl"] for split, part in splits.items()},
        convert=functools.partial(_convert, task=name),
        judge=choices.LETTERS,
    )


ARC = _task("arc", "ARC-Challenge")
ARC_EASY = _task("arc_easy", "ARC-Easy")
