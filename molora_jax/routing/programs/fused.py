"""What all programs share that fuse the logits of all models at every token."""

import dataclasses

from molora_jax.routing.program import Mode, Program, decide


@dataclasses.dataclass(frozen=True)
class Fused(Program):
    """Every token is sampled from `fuse`; the last model leads, whose adapter and hidden state count."""

    modes = frozenset({Mode.FUSE})

    def start(self, params, knobs, state):
        return state, decide(self.models - 1, mode=Mode.FUSE)

    def step(self, params, knobs, state, model, sig):
        return self.start(params, knobs, state)
