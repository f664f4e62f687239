"""How completions of a task are judged."""

import dataclasses
from collections.abc import Callable, Sequence

from molora_jax.data.tasks.reward import Reward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judge:
    """Reads answers off completions and compares them.

    Attributes:
      parse: the answer that a completion gives, None where it gives none.
      equal: whether the expected answer and a parsed one are the same; for all pairs at once, so that slow comparisons
        can share worker processes.
      reasoned: whether a completion shows its reasoning.
      valid: whether its answer has the form that the prompt demands.
    """

    parse: Callable[[str], str | None]
    equal: Callable[[Sequence[tuple[str, str]]], list[bool]]
    reasoned: Callable[[str], bool]
    valid: Callable[[str], bool]

    def verify(self, answers: Sequence[str], completions: Sequence[str]) -> list[bool]:
        """Whether each completion gives its expected answer."""
        given = [self.parse(completion) for completion in completions]
        found = [i for i, answer in enumerate(given) if answer is not None]
        right = dict(zip(found, self.equal([(answers[i], given[i]) for i in found]), strict=True))
        return [right.get(i, False) for i in range(len(completions))]

    def rewards(self, answers: Sequence[str], completions: Sequence[str], reward: Reward) -> list[float]:
        """What each completion earns."""
        return [
            reward(correct=correct, reasoned=self.reasoned(text), valid=self.valid(text))
            for correct, text in zip(self.verify(answers, completions), completions, strict=True)
        ]


def same_text(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """Equality of stripped lower-case texts."""
    return [expected.strip().lower() == given.strip().lower() for expected, given in pairs]
