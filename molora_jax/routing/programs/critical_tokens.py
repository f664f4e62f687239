"""Collaborative decoding of critical tokens (Jin et al. 2024, arXiv 2402.17982): facts come from the other model."""

import dataclasses

from molora_jax.routing import heads
from molora_jax.routing.heads import HeadConfig
from molora_jax.routing.program import Program, decide, select


@dataclasses.dataclass(frozen=True)
class CriticalTokens(Program):
    """The pretrained model writes the tokens that a classifier calls critical, the aligned one all others (§3).

    The classifier reads the aligned model's hidden state before each token, so that one critical token after another
    costs the aligned model a run each. Both sample as the request says; the paper's pretrained model is greedy.
    `params`: `head`, of `heads.init`.
    """

    head: HeadConfig
    aligned: int = 0
    pretrained: int = 1

    signals = frozenset({"hidden"})
    knobs = {"threshold": 0.5}

    @property
    def hidden_of(self):
        return self.aligned

    def start(self, params, knobs, state):
        return state, decide(self.aligned)

    def score(self, params, sig):
        return heads.score(self.head, params["head"], sig.hidden)

    def step(self, params, knobs, state, model, sig):
        critical = self.score(params, sig) >= knobs["threshold"]
        route = (model == self.aligned) & critical
        return state, select(route, decide(self.pretrained, drop=1, budget=1), decide(model))
