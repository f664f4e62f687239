"""The benchmarks by name, and the judge of every example."""

from collections.abc import Sequence

from molora_jax.config import UserError
from molora_jax.data.example import Example
from molora_jax.data.tasks.arc import ARC, ARC_EASY
from molora_jax.data.tasks.boolq import BOOLQ
from molora_jax.data.tasks.cola import COLA
from molora_jax.data.tasks.gsm8k import GSM8K
from molora_jax.data.tasks.judge import Judge
from molora_jax.data.tasks.medqa import MEDQA
from molora_jax.data.tasks.svamp import SVAMP
from molora_jax.data.tasks.task import Task
from molora_jax.data.testbed.verifier import JUDGE

TASKS = {task.name: task for task in (GSM8K, SVAMP, ARC, ARC_EASY, BOOLQ, COLA, MEDQA)}


def task(name: str) -> Task:
    """The benchmark of that name.

    Raises:
      UserError: there is none.
    """
    if name not in TASKS:
        raise UserError(f"tasks: got {name!r}, expected one of {', '.join(TASKS)}")
    return TASKS[name]


def judge(example: Example) -> Judge:
    """Of the example's benchmark; of the testbed where it is none."""
    return TASKS[example.task].judge if example.task in TASKS else JUDGE


def verify(examples: Sequence[Example], written: Sequence[str]) -> list[bool]:
    """Whether each answer is right; all of one task at once, for slow verifiers share their workers."""
    right = [False] * len(examples)
    for name in {example.task for example in examples}:
        at = [i for i, example in enumerate(examples) if example.task == name]
        found = judge(examples[at[0]]).verify([examples[i].answer for i in at], [written[i] for i in at])
        for i, correct in zip(at, found, strict=True):
            right[i] = correct
    return right
