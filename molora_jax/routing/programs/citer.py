"""CITER (Zheng et al. 2025, arXiv 2502.01976, §3): a perceptron says whether the small model will do for a token."""

import dataclasses

from molora_jax.routing import heads
from molora_jax.routing.heads import HeadConfig
from molora_jax.routing.program import LARGE, SMALL, Program, decide, select


@dataclasses.dataclass(frozen=True)
class CITER(Program):
    """The large model writes each token for which P(the small model will do) is under `threshold`.

    The perceptron sees the hidden state that the token is about to be written from, so that the small model's own
    attempt is dropped. `params`: `head`, of `heads.init`.
    """

    head: HeadConfig

    signals = frozenset({"hidden"})
    knobs = {"threshold": 0.5}
    below = True

    def score(self, params, sig):
        return heads.score(self.head, params["head"], sig.hidden)

    def step(self, params, knobs, state, model, sig):
        route = (model == SMALL) & (self.score(params, sig) < knobs["threshold"])
        return state, select(route, decide(LARGE, drop=1, budget=1), decide(model))
