"""Contrastive decoding (Li et al. 2023, arXiv 2210.15097, §3): what the expert likes more than the amateur does."""

import jax
import jax.numpy as jnp

from molora_jax.routing.program import LARGE, SMALL
from molora_jax.routing.programs.fused import Fused


class Contrastive(Fused):
    """Scores log p_expert - `strength` log p_amateur among the tokens with p_expert ≥ `alpha` max p_expert.

    The amateur is the small model, the expert the large one; the other tokens are at -inf (eq. 3 and 4).
    """

    knobs = {"alpha": 0.1, "strength": 1.0}

    def fuse(self, params, knobs, state, logits):
        logs = jax.nn.log_softmax(logits, axis=-1)
        expert, amateur = logs[LARGE], logs[SMALL]
        plausible = expert >= jnp.log(knobs["alpha"]).astype(logs.dtype) + jnp.max(expert)
        return jnp.where(plausible, expert - knobs["strength"].astype(logs.dtype) * amateur, -jnp.inf)
