"""What a run has come to, before anybody decides what follows: a token written, a draft judged, or a score."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from molora_jax.engine import sampling
from molora_jax.engine.table import RequestTable
from molora_jax.routing.program import VERIFY_DRAW, Draft, Mode, Program
from molora_jax.routing.turn import Turn
from molora_jax.typing import Array, Bool, Float, Int, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of each of B requests.

    Attributes:
      length: tokens that it had, or, after a rejected draft, still has.
      wrote: whether a token follows them.
      token: that token.
      hold: how many of them are still held.
      logits: what the token was drawn from, or the score read, before temperature and cuts.
      hidden: last hidden state at that position.
      score, accepted, span_logprobs: signals of SCORE and VERIFY; zeros in other modes.
    """

    length: Int[Array, "B"]
    wrote: Bool[Array, "B"]
    token: Int[Array, "B"]
    hold: Int[Array, "B"]
    logits: Float[Array, "B V"]
    hidden: Float[Array, "B D"]
    score: Float[Array, "B"]
    accepted: Int[Array, "B"]
    span_logprobs: Float[Array, "B draft"]


@dataclasses.dataclass(frozen=True)
class Rows:
    """The requests of a run, gathered from the table: B of them.

    Attributes:
      slot: their slots.
      length: tokens of each.
      sampling, turn, state, knobs: as in the table.
    """

    slot: Int[Array, "B"]
    length: Int[Array, "B"]
    sampling: sampling.Sampling
    turn: Turn
    state: Params
    knobs: dict[str, Float[Array, "B"]]

    @classmethod
    def of(cls, table: RequestTable, slot: Int[Array, "B"]) -> "Rows":
        kept = (table.length, table.sampling, table.journey.turn, table.journey.state, table.journey.knobs)
        return cls(slot, *jax.tree.map(lambda leaf: leaf[slot], kept))


def written(program: Program, rows: Rows, logits: Float[Array, "B V"], hidden: Float[Array, "B D"]) -> Outcome:
    """DECODE and FUSE: every request gets a token of `logits`."""
    token = sampling.sample(logits, rows.sampling, rows.length, model=rows.turn.model)
    wrote = jnp.ones_like(rows.length, bool)
    return Outcome(rows.length, wrote, token, rows.turn.hold, logits, hidden, **_nothing(program, rows))


def fused(program: Program, params: Params, rows: Rows, logits: Sequence[Float[Array, "B V"]]) -> Float[Array, "B V"]:
    """FUSE: what the program makes of all models' logits."""
    stacked = jnp.stack(logits, axis=1)
    return jax.vmap(program.fuse, in_axes=(None, 0, 0, 0))(params, rows.knobs, rows.state, stacked)


def scored(
    program: Program,
    params: Params,
    table: RequestTable,
    rows: Rows,
    logits: Float[Array, "B V"],
    hidden: Float[Array, "B D"],
    window: Float[Array, "B K V"] | None,
) -> Outcome:
    """SCORE: nothing is written.

    Args:
      window: logits from which the last K tokens could have been drawn, where the program asks for their probabilities.
    """
    score = jax.vmap(program.read, in_axes=(None, 0, 0, 0))(params, rows.knobs, rows.state, logits)
    known = _nothing(program, rows) | dict(score=score.astype(jnp.float32))
    if window is not None:
        known["span_logprobs"] = span(table, rows, window)
    last = table.tokens[rows.slot, rows.length - 1]
    return Outcome(rows.length, jnp.zeros_like(rows.length, bool), last, rows.turn.hold, logits, hidden, **known)


def verified(
    program: Program,
    params: Params,
    table: RequestTable,
    rows: Rows,
    logits: Float[Array, "B K+1 V"],
    hidden: Float[Array, "B K+1 D"],
) -> Outcome:
    """VERIFY: of the held tokens a prefix stays, and one follows unless the last that stays ends the request.

    Args:
      logits: before each of the last K tokens, and after the last.
    """
    K, held = program.draft, rows.turn.hold
    first = rows.length - held
    nth = jnp.arange(K)
    judged = jnp.take_along_axis(logits, _clipped(K - held[:, None] + jnp.arange(K + 1), K)[:, :, None], axis=1)
    tokens = jnp.where(nth < held[:, None], table.tokens[rows.slot[:, None], _clipped(first[:, None] + nth, None)], 0)
    own = table.journey.drafts[rows.slot[:, None], (first[:, None] + nth) % K].astype(logits.dtype)
    draft = Draft(
        tokens=tokens,
        count=held,
        q=_mass(own, rows.sampling),
        p=_mass(judged, rows.sampling),
        q_logits=own,
        p_logits=judged,
    )
    keys = sampling.keys(rows.sampling.seed, first, rows.turn.model, VERIFY_DRAW)
    count, token = jax.vmap(program.accept, in_axes=(None, 0, 0, 0, 0))(params, rows.knobs, rows.state, draft, keys)
    stops = jnp.any(tokens[:, :, None] == table.stops[rows.slot][:, None, :], axis=-1) & (nth < count[:, None])
    count = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, count).astype(jnp.int32)
    over = (count > 0) & (jnp.any(stops, axis=1) | (first + count >= table.limit[rows.slot]))
    pick = lambda of: jnp.take_along_axis(of, jnp.expand_dims(count, (1, 2)), axis=1)[:, 0]
    after = jnp.take_along_axis(hidden, _clipped(K - held + count, K)[:, None, None], axis=1)[:, 0]
    known = _nothing(program, rows) | dict(accepted=count, span_logprobs=span(table, rows, logits[:, :-1]))
    token = jnp.where(over, table.tokens[rows.slot, first + count - 1], token)
    return Outcome(first + count, ~over, token, count, pick(judged), after, **known)


def span(table: RequestTable, rows: Rows, window: Float[Array, "B K V"]) -> Float[Array, "B K"]:
    """Log-probability of each of the last K tokens that is held, zeros in front."""
    K = window.shape[1]
    at = _clipped(rows.length[:, None] - K + jnp.arange(K), None)
    tokens = table.tokens[rows.slot[:, None], at]
    logs = jnp.take_along_axis(window, tokens[:, :, None], axis=2)[:, :, 0] - jax.nn.logsumexp(window, axis=-1)
    return jnp.where(jnp.arange(K) >= K - rows.turn.hold[:, None], logs, 0)


def _mass(logits: Float[Array, "B K V"], how: sampling.Sampling) -> Float[Array, "B K V"]:
    each = jax.tree.map(lambda leaf: jnp.repeat(leaf, logits.shape[1]), how)
    return sampling.distribution(logits.reshape(-1, logits.shape[-1]), each).reshape(logits.shape)


def _clipped(index: Int[Array, "..."], most: int | None) -> Int[Array, "..."]:
    return jnp.clip(index, 0, most)


def _nothing(program: Program, rows: Rows) -> dict[str, Array]:
    zeros = jnp.zeros_like(rows.length)
    return dict(
        score=zeros.astype(jnp.float32),
        accepted=zeros,
        span_logprobs=jnp.zeros((*zeros.shape, program.draft)),
    )


def has_window(program: Program, mode: Mode) -> bool:
    """Whether a run in this mode looks at the logits before each of the held tokens."""
    return mode == Mode.VERIFY or (mode == Mode.SCORE and "span_logprobs" in program.signals)
