"""GSM8K (Cobbe et al. 2021): school mathematics with a written solution and a whole number as the answer.

Rows of the official JSONL: `question` and `answer`, a solution with calculator notes `<<48/2=24>>` that ends `#### 24`.
"""

import re
from typing import Any

from molora_jax.data.example import Example
from molora_jax.data.rows import RowError, field
from molora_jax.data.tasks import answers, maths
from molora_jax.data.tasks.judge import Judge
from molora_jax.data.tasks.task import Task

MATHS = Judge(parse=answers.mathematical, equal=maths.equal, reasoned=answers.reasoned, valid=answers.valid)


def _convert(row: Any, id: str, split: str) -> Example:
    question, solution = field(row, "question", str).strip(), field(row, "answer", str)
    final = answers.after_hashes(solution)
    if final is None or maths.number(final) is None:
        raise RowError("its answer does not end in #### and a number")
    reasoning = re.sub(r"<<[^>]*>>", "", solution[: solution.rindex("####")])
    answer = final.replace(",", "")
    return Example(
        id=id,
        task="gsm8k",
        prompt=f"{question}\n\n{answers.INSTRUCTION}\n",
        completion=answers.worked(reasoning, answer),
        answer=answer,
        split=split,
    )


GSM8K = Task(
    name="gsm8k",
    files={"train": ["maths/gsm8k_train.jsonl"], "test": ["maths/gsm8k_test.jsonl"]},
    convert=_convert,
    judge=MATHS,
)
