"""SpecReason (Pan et al. 2025, arXiv 2504.07891, §4): the large model grades each step, and rewrites the poor ones."""

import dataclasses

import jax.numpy as jnp

from molora_jax.routing.program import LARGE, SMALL, Mode, Program, decide, select


@dataclasses.dataclass(frozen=True)
class SpecReason(Program):
    """The small model writes a step; a grade under `threshold` takes it back, and `writer` writes the step instead.

    `score_tokens` ask `scorer` for a grade; `digits` are the tokens of 0 to 9, and the grade is the likeliest of them.
    A step ends with a token of `params["delimiter"]` (bool, [V]), after `longest` tokens, or with the answer.
    """

    score_tokens: tuple[int, ...]
    digits: tuple[int, ...] = ()
    scorer: int = LARGE
    writer: int = LARGE
    longest: int = 256
    knobs = {"threshold": 7.0}
    signals = frozenset({"token", "mode", "score", "stop"})
    modes = frozenset({Mode.DECODE, Mode.SCORE})

    @property
    def models(self) -> int:
        return max(self.scorer, self.writer) + 1

    def init(self, params, knobs, key):
        return jnp.int32(0)  # tokens of the step so far

    def step(self, params, knobs, state, model, sig):
        graded, small = sig.mode == Mode.SCORE, model == SMALL
        poor = graded & (sig.score < knobs["threshold"])
        length = state + ~graded
        over = ~graded & (params["delimiter"][sig.token] | sig.stop | (length >= self.longest))
        score = decide(self.scorer, mode=Mode.SCORE, hold=length)
        rewrite = decide(self.writer, drop=length)
        go_on = decide(jnp.where(graded | over, SMALL, model), hold=jnp.where(small & ~graded, length, 0))
        decision = select(poor, rewrite, select(small & over, score, go_on))
        return jnp.where(graded | (over & ~small), 0, length), decision

    def read(self, params, knobs, state, logits):
        return jnp.argmax(logits[jnp.asarray(self.digits)]).astype(jnp.float32)
