"""R2R, Roads to Rome (Fu et al. 2025, arXiv 2505.21600, §4): a classifier sends divergent tokens to the large model."""

import dataclasses

from molora_jax.routing import heads
from molora_jax.routing.heads import HeadConfig
from molora_jax.routing.program import LARGE, SMALL, Program, decide, select


@dataclasses.dataclass(frozen=True)
class R2R(Program):
    """The small model's token is dropped and rewritten by the large one where the classifier reaches `threshold`.

    It sees the small model's last hidden state, the embedding of the token it sampled, and its sorted top-k logits.
    `params`: `head`, of `heads.init`, and `embedding`, the small model's: [V, D].
    """

    head: HeadConfig

    signals = frozenset({"token", "hidden", "top_k"})
    knobs = {"threshold": 0.5}

    @property
    def top_k(self) -> int:
        return self.head.top_k

    def score(self, params, sig):
        embedding = params["embedding"][sig.token]
        return heads.score(self.head, params["head"], sig.hidden, embedding, sig.top_k.values)

    def step(self, params, knobs, state, model, sig):
        route = (model == SMALL) & (self.score(params, sig) >= knobs["threshold"])
        return state, select(route, decide(LARGE, drop=1, budget=1), decide(model))
