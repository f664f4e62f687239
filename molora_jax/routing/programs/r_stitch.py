"""R-Stitch (Chen et al. 2025, arXiv 2507.17307, §3): entropy hands over in both directions."""

import dataclasses
import math

import jax.numpy as jnp

from molora_jax.routing.program import LARGE, SMALL, Program, decide, select


@dataclasses.dataclass(frozen=True)
class RStitch(Program):
    """Uncertain, the small model's token is dropped and the large one writes on until it is certain itself.

    Uncertain: H/log V > `threshold`. The large model's certain token stays, and the small one continues after it.
    `vocab`: V, without padding.
    """

    vocab: int

    signals = frozenset({"entropy"})
    knobs = {"threshold": 0.03}

    def step(self, params, knobs, state, model, sig):
        uncertain = sig.entropy / math.log(self.vocab) > knobs["threshold"]
        peer = jnp.where(uncertain, LARGE, SMALL)
        return state, select(uncertain & (model == SMALL), decide(LARGE, drop=1), decide(peer))
