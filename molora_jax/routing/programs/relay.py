"""RelayLLM (Huang et al. 2026, arXiv 2601.05167, §3): the small model itself asks, by a command in its text."""

import dataclasses

import jax.numpy as jnp

from molora_jax.routing.program import LARGE, SMALL, Program, decide, select


@dataclasses.dataclass(frozen=True)
class Relay(Program):
    """After `<call>n</call>` the large model writes n tokens; the command stays in the text for both.

    `opening`, `closing`: the tokens of `<call>` and `</call>`. `params["digits"]`: what number a token reads as, -1
    where it is none: [V]. A command without a number in it is text; n is cut to `most`.
    """

    opening: tuple[int, ...]
    closing: tuple[int, ...]
    knobs = {"most": 128}
    signals = frozenset({"token", "pattern_hits"})

    @property
    def patterns(self):
        return (self.opening, self.closing)

    def init(self, params, knobs, key):
        return dict(number=jnp.int32(0), inside=jnp.bool_(False))

    def step(self, params, knobs, state, model, sig):
        opened, closed = sig.pattern_hits
        digit = params["digits"][sig.token]
        # n ends where the first token of `</call>` stands: what is no digit leaves the number as it is
        grown = jnp.minimum(10 * state["number"] + digit, knobs["most"].astype(jnp.int32))
        number = jnp.where(state["inside"] & (digit >= 0), grown, state["number"])
        call = (model == SMALL) & state["inside"] & closed & (number > 0)
        state = dict(number=jnp.where(opened, 0, number), inside=opened | (state["inside"] & ~closed))
        return state, select(call, decide(LARGE, budget=number), decide(model))
