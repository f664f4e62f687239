"""What a completion earns in reinforcement learning from verifiable rewards."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward:
    """A sum of parts.

    Attributes:
      correct: for the right answer.
      wrong: for any other completion.
      reasoned: on top of either, for visible reasoning.
      valid: on top of `wrong`, for an answer in the demanded form.
    """

    correct: float = 1.0
    wrong: float = 0.0
    reasoned: float = 0.0
    valid: float = 0.0

    def __call__(self, *, correct: bool, reasoned: bool, valid: bool) -> float:
        base = self.correct if correct else self.wrong + self.valid * valid
        return base + self.reasoned * reasoned


RELEASED = Reward(correct=1.0, wrong=-1.1, reasoned=0.2, valid=0.1)
"""Of the released code of Hard-Routed MoR-LoRA (Molavi et al. 2026); reasoning is `<think>…</think>`, the form JSON."""

EXACT = Reward()
"""1 for the right answer, else 0."""
