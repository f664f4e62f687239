"""Reward-guided speculative decoding (Liao et al. 2025, arXiv 2501.19324, §3): a reward model judges each step."""

import dataclasses

import jax

from molora_jax.routing.programs.spec_reason import SpecReason


@dataclasses.dataclass(frozen=True)
class RSD(SpecReason):
    """The draft model's step stays if its reward reaches `threshold` (δ); else the target model writes the step.

    Models: 0 drafts, 1 is the target, 2 a process reward model that says after `score_tokens` whether the step is good:
    the reward is the probability of `digits[0]` (good) against `digits[1]` (bad).
    """

    scorer: int = 2
    knobs = {"threshold": 0.7}

    def read(self, params, knobs, state, logits):
        good, bad = self.digits
        return jax.nn.sigmoid(logits[good] - logits[bad])
