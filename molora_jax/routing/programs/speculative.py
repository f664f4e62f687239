"""Speculative decoding (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1): exactly the large model's samples."""

import dataclasses

import jax.numpy as jnp

from molora_jax.routing import acceptance
from molora_jax.routing.program import LARGE, SMALL, Mode, Program, decide, select


@dataclasses.dataclass(frozen=True)
class Speculative(Program):
    """The small model drafts K tokens; the large one reads them at once, keeps a prefix and adds a token of its own.

    Greedy decoding is the case in which both distributions have all their mass on one token.
    """

    draft: int = 4

    signals = frozenset({"stop"})
    modes = frozenset({Mode.DECODE, Mode.VERIFY})

    def init(self, params, knobs, key):
        return jnp.int32(0)

    def step(self, params, knobs, state, model, sig):
        drafted = jnp.where(model == SMALL, state + 1, 0)
        full = (drafted == self.draft) | sig.stop
        verify = decide(LARGE, mode=Mode.VERIFY, hold=drafted)
        return drafted, select((model == SMALL) & full, verify, decide(SMALL, hold=drafted))

    def accept(self, params, knobs, state, draft, key):
        return acceptance.rejection(draft, self.target(knobs, draft), key)

    def target(self, knobs, draft):
        """The distribution that each token shall have: [K+1, V]; here the large model's."""
        return draft.p
