"""GlimpRouter (Zeng et al. 2026, arXiv 2601.05110, §3): the first token of a step tells how hard the step is."""

import dataclasses

import jax.numpy as jnp

from molora_jax.routing.program import LARGE, SMALL, Program, decide, select


@dataclasses.dataclass(frozen=True)
class GlimpRouter(Program):
    """The small model writes the first token of each step; if its entropy exceeds `threshold`, the large one the step.

    A step ends with a token of `params["delimiter"]` (bool, [V]: the tokens that hold a blank line). After `closing`,
    the tokens of `</think>`, the large model writes the answer.
    """

    closing: tuple[int, ...]
    knobs = {"threshold": 1.0}
    signals = frozenset({"token", "entropy", "pattern_hits"})

    @property
    def patterns(self):
        return (self.closing,)

    def init(self, params, knobs, key):
        return dict(first=jnp.bool_(True), thinking=jnp.bool_(True))

    def step(self, params, knobs, state, model, sig):
        delimiter, closed = params["delimiter"][sig.token], sig.pattern_hits[0]
        hard = (model == SMALL) & state["first"] & (sig.entropy > knobs["threshold"])
        thinking = state["thinking"] & (hard | ~closed)
        # a token that is dropped ends nothing
        following = jnp.where(thinking & delimiter, SMALL, model)
        decision = select(hard, decide(LARGE, drop=1), decide(jnp.where(thinking, following, LARGE)))
        return dict(first=delimiter & ~hard, thinking=thinking), decision
