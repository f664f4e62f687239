"""Deferral by uncertainty of the next token: entropy, max-prob or margin (Gupta et al. 2024, arXiv 2404.10136, §3)."""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from molora_jax.routing.program import LARGE, SMALL, Program, decide, select


@dataclasses.dataclass(frozen=True)
class Deferral(Program):
    """The small model's token is dropped when it is unsure, and the large one writes `budget` tokens.

    Unsure: the entropy is above `threshold`, or the highest probability or its margin over the second is below it.
    """

    by: Literal["entropy", "max_prob", "margin"] = "entropy"
    knobs = {"threshold": 0.5, "budget": 1}

    @property
    def signals(self):
        return frozenset({self.by})

    @property
    def below(self) -> bool:
        return self.by != "entropy"

    def score(self, params, sig):
        return getattr(sig, self.by)

    def step(self, params, knobs, state, model, sig):
        value = self.score(params, sig)
        unsure = value < knobs["threshold"] if self.below else value > knobs["threshold"]
        handoff = decide(LARGE, drop=1, budget=jnp.maximum(knobs["budget"], 1))
        return state, select(unsure & (model == SMALL), handoff, decide(model))
