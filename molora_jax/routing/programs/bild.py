"""BiLD, the Big Little Decoder (Kim et al. 2023, arXiv 2302.07863, §3): fall back when unsure, roll back when wrong."""

import dataclasses

import jax
import jax.numpy as jnp

from molora_jax.routing import acceptance
from molora_jax.routing.program import LARGE, SMALL, Mode, Program, decide, select


@dataclasses.dataclass(frozen=True)
class BiLD(Program):
    """The small model writes until its highest probability is below `fallback`, or K tokens; then the large one reads.

    Rollback: at the first token whose distance, -log p_L(token), exceeds `rollback`, the large model's own token takes
    its place and all after it go. Without one the large model writes the next token.
    """

    draft: int = 10

    signals = frozenset({"max_prob", "stop"})
    modes = frozenset({Mode.DECODE, Mode.VERIFY})
    knobs = {"fallback": 0.6, "rollback": 2.0}

    def init(self, params, knobs, key):
        return jnp.int32(0)

    def step(self, params, knobs, state, model, sig):
        small, unsure = model == SMALL, sig.max_prob < knobs["fallback"]
        drafted = jnp.where(small, state + 1 - unsure, 0)
        fall_back = small & (unsure | sig.stop | (drafted == self.draft))
        verify = decide(LARGE, mode=Mode.VERIFY, hold=drafted, drop=unsure)
        return drafted, select(fall_back, verify, decide(SMALL, hold=drafted))

    def accept(self, params, knobs, state, draft, key):
        logs = jax.nn.log_softmax(draft.p_logits[:-1], axis=-1)
        distance = -jnp.take_along_axis(logs, draft.tokens[:, None], axis=-1)[:, 0]
        count = acceptance.leading(distance <= knobs["rollback"], draft.count)
        return count, acceptance.draw(draft.p[count], jax.random.uniform(key))
