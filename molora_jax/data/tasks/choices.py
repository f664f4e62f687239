"""Questions with lettered choices: what ARC and MedQA share."""

from collections.abc import Sequence

from molora_jax.data.example import Example
from molora_jax.data.rows import RowError
from molora_jax.data.tasks import answers
from molora_jax.data.tasks.judge import Judge, same_text

LETTERS = Judge(parse=answers.one_of(*"ABCDE12345"), equal=same_text, reasoned=answers.reasoned, valid=answers.valid)


def example(*, id: str, task: str, split: str, question: str, choices: Sequence[tuple[str, str]], key: str) -> Example:
    """An example that asks for the letter of the right choice.

    Args:
      choices: (letter, text), in order.
      key: letter of the right one.

    Raises:
      RowError: no choices, a letter twice, or a key that is none of the letters.
    """
    letters = [letter for letter, _ in choices]
    if not choices or len(set(letters)) < len(letters):
        raise RowError(f"its choices are {letters}, expected different letters")
    if key not in letters:
        raise RowError(f"its key is {key!r}, expected one of {', '.join(letters)}")
    lines = "\n".join(f"{letter}. {text.strip()}" for letter, text in choices)
    return Example(
        id=id,
        task=task,
        prompt=f"{question.strip()}\n{lines}\n\nAnswer with a letter. {answers.INSTRUCTION}\n",
        completion=answers.worked("", key),
        answer=key,
        split=split,
    )
