"""A program between models of different tokenizers: control changes hands only where a character is whole."""

import dataclasses

import jax.numpy as jnp

from molora_jax.config import UserError
from molora_jax.routing.program import UNLIMITED, Mode, Program, decide, select

WHOLE = 0
"""State of a text that ends with a whole character."""


@dataclasses.dataclass(frozen=True)
class WholeCharacters(Program):
    """Decides as `inner` does, but a model that is in the middle of a UTF-8 character goes on until it is whole.

    Only text can be handed over, and half a character is none. So a hand-over there does not take place: the token that
    was just written stays, even if `inner` would have taken it back, and `inner` decides again after the next one. A
    return because a budget is used up waits likewise. What is handed over is final: nothing is held.

    `params` are those of `inner`, and `transitions`: of each model, where in a character the text ends after each of
    its tokens, from where it ended before, 0 where it is whole: [V, states].
    """

    inner: Program

    models = property(lambda self: self.inner.models)
    signals = property(lambda self: self.inner.signals | {"token"})
    knobs = property(lambda self: self.inner.knobs)
    top_k = property(lambda self: self.inner.top_k)
    hidden_of = property(lambda self: self.inner.hidden_of)
    below = property(lambda self: self.inner.below)

    def __post_init__(self):
        """Raises `UserError` for a program that needs one vocabulary."""
        others = sorted(mode.name for mode in self.inner.modes - {Mode.DECODE}) + ["patterns"] * bool(
            self.inner.patterns
        )
        if others:
            name = type(self.inner).__name__
            raise UserError(
                f"program: got {name} with {', '.join(others)}, expected one that only decodes and looks for no "
                "tokens: these models have tokenizers of their own"
            )

    def init(self, params, knobs, key):
        own = dict(inside=jnp.int32(WHOLE), home=jnp.int32(0), left=jnp.int32(UNLIMITED))
        return dict(inner=self.inner.init(params["inner"], knobs, key), **own)

    def start(self, params, knobs, state):
        inner, first = self.inner.start(params["inner"], knobs, state["inner"])
        return state | dict(inner=inner, home=first.next_model), first

    def step(self, params, knobs, state, model, sig):
        inner, asked = self.inner.step(params["inner"], knobs, state["inner"], model, sig)
        ends = [table[jnp.minimum(sig.token, len(table) - 1), state["inside"]] for table in params["transitions"]]
        after = jnp.stack(ends)[model].astype(jnp.int32)
        drop = jnp.clip(asked.drop, 0, 1)
        inside = jnp.where(drop > 0, state["inside"], after)
        left = jnp.where(state["left"] == UNLIMITED, UNLIMITED, state["left"] - 1)
        spent = (asked.next_model == model) & (left <= 0)
        to = jnp.where(spent, state["home"], asked.next_model)
        leaves = (to != model) & (inside == WHOLE)
        waits = (to != model) & (inside != WHOLE)
        budget = jnp.where(spent, UNLIMITED, jnp.maximum(asked.budget, 1))
        following = dict(
            inner=inner,
            inside=jnp.where(waits, after, inside),
            home=jnp.where(leaves, model, state["home"]),
            left=jnp.where(leaves, budget, left),
        )
        return following, select(waits, decide(model), decide(to, drop=drop, adapter=asked.adapter))

    def score(self, params, sig):
        return self.inner.score(params["inner"], sig)
