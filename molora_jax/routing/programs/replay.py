"""A recorded trace, replayed: the oracle of every routed run."""

import dataclasses

import jax.numpy as jnp

from molora_jax.routing.program import LARGE, SMALL, Program, decide, select


@dataclasses.dataclass(frozen=True)
class Replay(Program):
    """Each token of a pair's answer is written by the model that a trace names, R2R's way: the small one tries first.

    `params["trace"]`: [positions], by index in the whole sequence; beyond its end the small model writes.
    """

    signals = frozenset({"position"})

    def step(self, params, knobs, state, model, sig):
        trace = params["trace"]
        inside = sig.position < trace.shape[0]
        wanted = jnp.where(inside, trace[jnp.minimum(sig.position, trace.shape[0] - 1)], SMALL)
        route = (model == SMALL) & (wanted == LARGE)
        return state, select(route, decide(LARGE, drop=1, budget=1), decide(model))
