"""Co-LLM (Shen et al. 2024, arXiv 2403.03870, §2): a latent variable, read off the base model, says who writes."""

import dataclasses

from molora_jax.routing import heads
from molora_jax.routing.heads import HeadConfig
from molora_jax.routing.program import LARGE, SMALL, Program, decide, select


@dataclasses.dataclass(frozen=True)
class CoLLM(Program):
    """The assistant writes token t where P(Z_t = 1 | X_<t) = σ(w·h_t + b) exceeds `threshold` (η in the paper).

    The decision comes before the sampling: the base model's attempt is dropped. `params`: `head`, of `heads.init`.
    """

    head: HeadConfig

    signals = frozenset({"hidden"})
    knobs = {"threshold": 0.5}

    def score(self, params, sig):
        return heads.score(self.head, params["head"], sig.hidden)

    def step(self, params, knobs, state, model, sig):
        route = (model == SMALL) & (self.score(params, sig) > knobs["threshold"])
        return state, select(route, decide(LARGE, drop=1, budget=1), decide(model))
