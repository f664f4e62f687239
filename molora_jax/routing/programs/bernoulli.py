"""Routing at random: the large model writes a share of the tokens, whatever they are; the baseline of every router."""

import dataclasses

import jax

from molora_jax.routing.program import LARGE, SMALL, Program, decide, select


@dataclasses.dataclass(frozen=True)
class Bernoulli(Program):
    """Each token of the small model is dropped and rewritten with probability `share`, independently."""

    signals = frozenset({"position"})
    knobs = {"share": 0.1}

    def init(self, params, knobs, key):
        return jax.random.bits(key)

    def step(self, params, knobs, state, model, sig):
        uniform = jax.random.uniform(jax.random.fold_in(jax.random.key(state), sig.position))
        route = (model == SMALL) & (uniform < knobs["share"])
        return state, select(route, decide(LARGE, drop=1, budget=1), decide(model))
