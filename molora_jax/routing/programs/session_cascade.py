"""A cascade by whole answers (FrugalGPT, Chen et al. 2023, arXiv 2305.05176, §3; score of Gupta et al. 2024, §3)."""

import dataclasses

import jax.numpy as jnp

from molora_jax.routing.program import SMALL, Program, decide, select


@dataclasses.dataclass(frozen=True)
class SessionCascade(Program):
    """Model 0 answers; if the mean log-probability of its answer is under `threshold`, model 1 does, and so on.

    A poor answer is taken back whole; the last model's stands, whatever its score.
    """

    models: int = 2
    signals = frozenset({"logprob", "stop"})
    knobs = {"threshold": -1.0}

    def init(self, params, knobs, key):
        return dict(count=jnp.int32(0), total=jnp.float32(0))

    def start(self, params, knobs, state):
        return state, decide(SMALL)

    def step(self, params, knobs, state, model, sig):
        count, total = state["count"] + 1, state["total"] + sig.logprob.astype(jnp.float32)
        last = model == self.models - 1
        poor = sig.stop & ~last & (total < knobs["threshold"] * count)
        decision = select(poor, decide(model + 1, drop=count), decide(model, hold=jnp.where(last | sig.stop, 0, count)))
        return dict(count=jnp.where(poor, 0, count), total=jnp.where(poor, 0, total)), decision
