"""One model alone: the baseline beside every routed run."""

import dataclasses

from molora_jax.routing.program import SMALL, Program, decide


@dataclasses.dataclass(frozen=True)
class Single(Program):
    """`model` writes everything."""

    model: int = SMALL

    @property
    def models(self) -> int:
        return self.model + 1

    def start(self, params, knobs, state):
        return state, decide(self.model)

    def step(self, params, knobs, state, model, sig):
        return state, decide(self.model)
