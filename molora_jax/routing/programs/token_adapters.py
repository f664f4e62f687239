"""Adapters chosen token by token, without a hand-off: MoLoRA's gate, a vocabulary table, or control tokens."""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from molora_jax.routing.program import SMALL, Program, decide


@dataclasses.dataclass(frozen=True)
class TokenAdapters(Program):
    """One model reads each token with the adapter that `by` chooses for it.

    `gate`: argmax of W h + b, h the hidden state it was written from (`params`: `weight` [E, D], `bias` [E]), as in
    MoLoRA. `table`: `params["table"]` gives each token's adapter: [V]. `control`: it gives the adapter that a control
    token switches to, for itself and what follows, and `program.KEEP` for all other tokens (Granite Switch).
    `first`: the prompt's adapter.
    """

    by: Literal["gate", "table", "control"] = "gate"
    first: int = -1
    models: int = 1

    @property
    def signals(self):
        return frozenset({"hidden"} if self.by == "gate" else {"token"})

    def start(self, params, knobs, state):
        return state, decide(SMALL, adapter=self.first)

    def step(self, params, knobs, state, model, sig):
        if self.by == "gate":
            adapter = jnp.argmax(params["weight"] @ sig.hidden + params["bias"])
        else:
            adapter = params["table"][sig.token]
        return state, decide(SMALL, adapter=adapter)
