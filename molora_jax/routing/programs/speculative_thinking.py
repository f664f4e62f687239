"""Speculative Thinking (Yang et al. 2025, arXiv 2504.12329, §3): the large model takes over where thought turns."""

import dataclasses

import jax.numpy as jnp

from molora_jax.routing.program import LARGE, SMALL, Program, decide, select

NEITHER, AFFIRM, REFLECT, VERIFY = range(4)
"""What `params["cue"]` says of a token."""


@dataclasses.dataclass(frozen=True)
class SpeculativeThinking(Program):
    """The large model writes `sentences` steps when the small one begins a step with a cue.

    A step ends with a token of `params["delimiter"]` (bool, [V]). `params["cue"]` ([V]) marks the words of affirmation,
    reflection and verification that may begin one; the cue itself stays. From the `reflections`-th reflection on, the
    large model takes over for good, which ends excessive reflection.
    """

    knobs = {"sentences": 1, "reflections": 10}
    signals = frozenset({"token"})

    def init(self, params, knobs, key):
        return dict(first=jnp.bool_(True), left=jnp.int32(0), reflections=jnp.int32(0))

    def step(self, params, knobs, state, model, sig):
        delimiter, cue = params["delimiter"][sig.token], params["cue"][sig.token]
        cue = jnp.where(state["first"], cue, NEITHER)
        reflections = state["reflections"] + (cue == REFLECT)
        excessive = reflections >= knobs["reflections"]
        takes_over = (model == SMALL) & (cue != NEITHER)
        left = jnp.where(takes_over, knobs["sentences"].astype(jnp.int32), state["left"] - delimiter)
        returns = (model == LARGE) & (left <= 0) & ~excessive
        decision = select(takes_over, decide(LARGE), decide(jnp.where(returns, SMALL, model)))
        return dict(first=delimiter, left=left, reflections=reflections), decision
