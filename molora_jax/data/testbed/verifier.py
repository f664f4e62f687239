"""Answers of the testbed: reading them off a completion, checking and rewarding them."""

from molora_jax.data.tasks.judge import Judge
from molora_jax.data.tasks.reward import Reward
from molora_jax.data.testbed.prompts import ARROW, BAR, joined


def parse(completion: str) -> str | None:
    """What follows the arrow, in the form of `Example.answer`; None where a completion has no answer.

    Of a prompt with several problems all answers are taken, joined by bars. Only the first line counts.
    """
    line = completion.split("\n")[0]
    parts = line.split(ARROW.strip())[1:]
    if not parts or BAR in parts[-1]:  # it went on after the last answer
        return None
    answers = [part.split(BAR)[0].strip() for part in parts]
    return joined(answers) if all(answers) else None


def _reasoned(completion: str) -> bool:
    before, arrow, _ = completion.partition(ARROW.strip())
    return bool(arrow and before.strip())


JUDGE = Judge(
    parse=parse,
    equal=lambda pairs: [expected == given for expected, given in pairs],
    reasoned=_reasoned,
    valid=lambda completion: parse(completion) is not None,
)
"""A completion is right if it gives exactly the expected answers, in order; the steps before them are not judged."""

REWARD = Reward(correct=1.0, wrong=0.0, reasoned=0.1)
