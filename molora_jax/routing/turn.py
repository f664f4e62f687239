"""Whose turn it is: what a runtime keeps of one request between runs, and how a decision changes it. Pure jnp."""

import dataclasses

import jax
import jax.numpy as jnp

from molora_jax.routing.program import KEEP, NO_ADAPTER, UNLIMITED, Decision, Mode, Program
from molora_jax.typing import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Turn:
    """Who runs next, and under which terms.

    Attributes:
      model: which model runs.
      mode: `Mode` of its run.
      home: who gets control back when the budget is used up.
      left: what is left of the budget.
      since: tokens that `model` has written since it took over.
      adapter: index of the adapter for the tokens from the last one on.
      hold: how many of the last tokens may still be taken back.
    """

    model: Int[Array, ""]
    mode: Int[Array, ""]
    home: Int[Array, ""]
    left: Int[Array, ""]
    since: Int[Array, ""]
    adapter: Int[Array, ""]
    hold: Int[Array, ""]


def begin(decision: Decision) -> Turn:
    """The first turn, from what `Program.start` decided; a budget would have nobody to return to, and is not kept."""
    zero = jnp.int32(0)
    adapter = jnp.where(decision.adapter == KEEP, NO_ADAPTER, decision.adapter)
    return Turn(decision.next_model, decision.mode, decision.next_model, jnp.int32(UNLIMITED), zero, adapter, zero)


def follow(program: Program, turn: Turn, decision: Decision, wrote: Int[Array, ""]) -> tuple[Turn, Int[Array, ""]]:
    """The next turn, and how many tokens to take back, after a run of `turn` and the decision it led to.

    Args:
      turn: as it was for the run, except that `hold` counts the held tokens that are still there after a VERIFY.
      wrote: tokens that the run committed beyond the held ones: 0 for SCORE, else 1.

    A hand-off is explicit (`next_model` changes) or forced: the model would stay, but its budget is used up.
    """
    loose = turn.hold + wrote
    drop = jnp.clip(decision.drop, 0, loose)
    left = jnp.where(turn.left == UNLIMITED, UNLIMITED, turn.left - wrote)
    forced = (decision.next_model == turn.model) & (left <= 0)
    model = jnp.where(forced, turn.home, decision.next_model)
    handed = forced | (decision.next_model != turn.model)
    budget = jnp.where(forced, UNLIMITED, jnp.maximum(decision.budget, 1))
    hold = jnp.clip(decision.hold, 0, loose - drop)
    if Mode.VERIFY in program.modes:
        hold = jnp.minimum(hold, program.draft)
    following = Turn(
        model=model,
        mode=jnp.where(forced, jnp.int32(Mode.DECODE), decision.mode),
        home=jnp.where(handed, turn.model, turn.home),
        left=jnp.where(handed, budget, left),
        since=jnp.where(handed, 0, turn.since + wrote),
        adapter=jnp.where(decision.adapter == KEEP, turn.adapter, decision.adapter),
        hold=hold,
    )
    return following, drop


def ended(turn: Turn, stop: Bool[Array, ""]) -> Bool[Array, ""]:
    """Whether the request is over: its last token stops it, and nobody is going to judge that token.

    Args:
      turn: the one that would follow.
      stop: after the drop, the last token of the answer is a stop token, or the length limit is reached.
    """
    return stop & (turn.mode != Mode.VERIFY) & (turn.mode != Mode.SCORE)
