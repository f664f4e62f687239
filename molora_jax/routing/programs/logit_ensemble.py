"""Ensembles: the linear opinion pool (Stone 1961) or a product of experts (Hinton 2002, §1), of one vocabulary."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from molora_jax.routing.programs.fused import Fused


@dataclasses.dataclass(frozen=True)
class LogitEnsemble(Fused):
    """Samples from Σ w_i p_i (`probability`) or from softmax(Σ w_i l_i) (`logit`), the weights `w{i}` summing to 1."""

    models: int = 2
    space: Literal["probability", "logit"] = "probability"

    @property
    def knobs(self):
        return {f"w{i}": 1 / self.models for i in range(self.models)}

    def fuse(self, params, knobs, state, logits):
        weights = jnp.stack([knobs[f"w{i}"] for i in range(self.models)]).astype(logits.dtype)
        weights = (weights / jnp.sum(weights))[:, None]
        if self.space == "logit":
            return jnp.sum(weights * logits, axis=0)
        return jax.nn.logsumexp(jnp.log(weights) + jax.nn.log_softmax(logits, axis=-1), axis=0)
