"""CoLA (Warstadt et al. 2018): whether a sentence is acceptable English.

Lines of the official TSV, without a header and without quoting: source, label (0 or 1), the author's mark, sentence.
`validation` is both development files, whose 1,043 sentences are what GLUE reports.
"""

from typing import Any

from molora_jax.data.example import Example
from molora_jax.data.rows import RowError
from molora_jax.data.tasks import answers
from molora_jax.data.tasks.judge import Judge, same_text
from molora_jax.data.tasks.task import Task

_LABELS = {"0": "unacceptable", "1": "acceptable"}


def _convert(row: Any, id: str, split: str) -> Example:
    if len(row) != 4:
        raise RowError(f"got {len(row)} columns, expected 4: source, label, mark, sentence")
    _, label, _, sentence = row
    if label not in _LABELS or not sentence.strip():
        raise RowError(f"got the label {label!r} of {sentence!r:.40}, expected 0 or 1 and a sentence")
    answer = _LABELS[label]
    return Example(
        id=id,
        task="cola",
        prompt=f"Is this sentence acceptable or unacceptable English?\n{sentence.strip()}\n\n{answers.INSTRUCTION}\n",
        completion=answers.worked("", answer),
        answer=answer,
        split=split,
    )


COLA = Task(
    name="cola",
    files={
        "train": ["cola/in_domain_train.tsv"],
        "validation": ["cola/in_domain_dev.tsv", "cola/out_of_domain_dev.tsv"],
    },
    convert=_convert,
    judge=Judge(
        parse=answers.one_of(*_LABELS.values()), equal=same_text, reasoned=answers.reasoned, valid=answers.valid
    ),
)
