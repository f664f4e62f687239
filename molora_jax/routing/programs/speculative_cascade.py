"""Speculative cascades (Narasimhan et al. 2025, arXiv 2405.19261, §4): a deferral rule, run by speculation."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from molora_jax.routing.programs.speculative import Speculative


@dataclasses.dataclass(frozen=True)
class SpeculativeCascade(Speculative):
    """Drafts are sampled towards π = (1 - δ) q + δ p, where a rule says whether to defer (δ = 1) to the large model.

    `chow` defers if max q < 1 - α; `diff` if max q < max p - α; `opt` if max q < max p - α TV(p, q) (§4.2). `token`
    defers token by token, those with p(v) < (1 - α) max p: π(v) = q(v) [v kept] + p(v) Σ_{u deferred} q(u) (§4.4).
    The rules see the models' own distributions; π mixes those that are sampled from. The token after a draft kept
    whole has no q, and is the large model's.
    """

    rule: Literal["chow", "diff", "opt", "token"] = "opt"
    knobs = {"alpha": 0.5}

    def target(self, knobs, draft):
        own_q, own_p = (jax.nn.softmax(scores, axis=-1) for scores in (draft.q_logits, draft.p_logits[:-1]))
        q, p, alpha = draft.q, draft.p[:-1], knobs["alpha"]
        top_q, top_p = (jnp.max(mass, axis=-1, keepdims=True) for mass in (own_q, own_p))
        if self.rule == "token":
            kept = own_p >= (1 - alpha) * top_p
            mixed = jnp.where(kept, q, 0) + p * jnp.sum(jnp.where(kept, 0, q), axis=-1, keepdims=True)
        else:
            variation = jnp.sum(jnp.maximum(own_p - own_q, 0), axis=-1, keepdims=True)
            bound = {"chow": 1 - alpha, "diff": top_p - alpha, "opt": top_p - alpha * variation}[self.rule]
            mixed = jnp.where(top_q < bound, p, q)
        return jnp.concatenate([mixed, draft.p[-1:]]).at[draft.count].set(draft.p[draft.count])
