"""BoolQ (Clark et al. 2019): a yes-no question about a passage.

Rows of the official JSONL: `question` (lower case, no question mark), `title`, `passage`, `answer` (true or false). The
official test labels are not public: `validation`, the development file, is what papers report. A training row that says
`passage_in_dev` is left out.
"""

from typing import Any

from molora_jax.data.example import Example
from molora_jax.data.rows import field
from molora_jax.data.tasks import answers
from molora_jax.data.tasks.judge import Judge, same_text
from molora_jax.data.tasks.task import Task

_WORDS = {"true": "yes", "false": "no"}


def _equal(pairs):
    """`true` and `false` count as `yes` and `no`."""
    return same_text([(expected, _WORDS.get(given.strip().lower(), given)) for expected, given in pairs])


def _convert(row: Any, id: str, split: str) -> Example | None:
    question, passage = field(row, "question", str).strip(), field(row, "passage", str).strip()
    answer = "yes" if field(row, "answer", bool) else "no"
    if row.get("passage_in_dev") and split == "train":
        return None
    question = question[:1].upper() + question[1:].rstrip("?")
    return Example(
        id=id,
        task="boolq",
        prompt=f"{passage}\n\n{question}? Answer yes or no. {answers.INSTRUCTION}\n",
        completion=answers.worked("", answer),
        answer=answer,
        split=split,
    )


BOOLQ = Task(
    name="boolq",
    files={"train": ["boolq/train*.jsonl"], "validation": ["boolq/dev.jsonl"]},
    convert=_convert,
    judge=Judge(
        parse=answers.one_of("yes", "no", "true", "false"),
        equal=_equal,
        reasoned=answers.reasoned,
        valid=answers.valid,
    ),
)
