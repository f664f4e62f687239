"""Beam search: the likeliest continuations of prompts, their keys and values shared as far as they agree.

A page is one token, and every beam writes its next token into a row of its own: when beams are reordered, only the
page tables are, and the states of the gates; no key is copied.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters.bank import Bank
from molora_jax.adapters.route import NONE, Route
from molora_jax.config import ModelConfig, UserError
from molora_jax.models import transformer
from molora_jax.models.state import DecodeState, new_state, restore, snapshot
from molora_jax.nn.layout import ragged
from molora_jax.typing import Array, Bool, Float, Int, Params

TILE = 16
STEP = 64
"""Prompts and continuations are padded to multiples of it."""


@dataclasses.dataclass(frozen=True)
class Beam:
    """A continuation.

    Attributes:
      tokens: the stop token, if one ended it, is the last.
      logprob: Σ log p of them under the model.
      finished: "stop" or "length".
      passes: of the model, behind the one that read the prompt, that the search took; the same for all that it found.
    """

    tokens: list[int]
    logprob: float
    finished: str
    passes: int


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "total", "done", "done_tokens", "done_total", "done_length"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class _Beams:
    """B prompts with W hypotheses each, and the W best of those that have ended; T tokens at most.

    Attributes:
      done: Σ log p / length^penalty of the ended ones, best first; -inf where there is none.
    """

    tokens: Int[Array, "B W T"]
    total: Float[Array, "B W"]
    done: Float[Array, "B W"]
    done_tokens: Int[Array, "B W T"]
    done_total: Float[Array, "B W"]
    done_length: Int[Array, "B W"]


def search(
    cfg: ModelConfig,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    beams: int = 4,
    max_new_tokens: int = 32,
    stops: Sequence[int] = (),
    penalty: float = 1.0,
    bank: Bank | None = None,
    expert: int = NONE,
) -> list[list[Beam]]:
    """The `beams` best continuations of each prompt found, best first, by Σ log p / length^penalty.

    Every step extends all hypotheses by all tokens and takes the `beams` likeliest: those that end with a stop token
    are put aside, the others go on, so that the beam narrows (Wu et al. 2016, §7, without coverage). It stops when no
    hypothesis can overtake those put aside, however it goes on; what has not ended after `max_new_tokens` counts as
    ended. Of equal scores the first hypothesis wins, then the smaller token. One beam is greedy search.

    Args:
      penalty: 0 prefers short continuations; at least 0.
      expert: slot of `bank` that every token uses.

    Raises:
      UserError: no or empty prompts, token ids out of range, or sizes below 1.
    """
    if not prompts or min(map(len, prompts)) < 1:
        raise UserError("beams: got no prompt or an empty one, expected at least one token each")
    ids = [token for prompt in prompts for token in prompt]
    if min(ids) < 0 or max(ids) >= cfg.vocab:
        raise UserError(f"beams: got token ids {min(ids)} to {max(ids)}, expected 0 to {cfg.vocab - 1}")
    if min(beams, max_new_tokens) < 1 or beams > cfg.vocab or penalty < 0:
        got = f"{beams} beams, {max_new_tokens} tokens and penalty {penalty}"
        raise UserError(f"beams: got {got}, expected from 1, 1 and 0, and no more beams than the vocabulary has tokens")
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    flat = np.zeros(-(-len(ids) // STEP) * STEP, np.int32)
    flat[: len(ids)] = ids
    width = -(-(lengths.max() + max_new_tokens) // STEP) * STEP
    ended = np.zeros(cfg.vocab, bool)
    ended[list(stops)] = True
    shape = (len(prompts), beams, max_new_tokens, int(width))
    found, passes = jax.device_get(
        _search(cfg, shape, float(penalty), params, bank, np.int32(expert), flat, lengths, ended)
    )
    return [_listed(row, int(passes)) for row in _rows(found, len(prompts))]


def _rows(found: _Beams, count: int):
    return [jax.tree.map(lambda leaf, i=i: leaf[i], found) for i in range(count)]


def _listed(row: _Beams, passes: int) -> list[Beam]:
    """Those of one prompt; a length below 0 marks what was cut."""
    out = []
    for score, tokens, total, length in zip(row.done, row.done_tokens, row.done_total, row.done_length, strict=True):
        if np.isfinite(score):
            finished = "stop" if length > 0 else "length"
            out.append(Beam(tokens[: abs(length)].tolist(), float(total), finished, passes))
    return out


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _search(cfg: ModelConfig, shape, penalty: float, params, bank, expert, flat, lengths, ended):
    """The whole search as one device program: what it found, and its passes."""
    count, beams, steps, width = shape
    rows, size = count * beams, flat.shape[0]
    pages = size + rows * steps
    dtype = params["embed"]["weight"].dtype
    state = new_state(cfg, pages=(pages,) * len(cfg.kinds), page_size=1, dtype=dtype, bank=bank, slots=rows)
    run = functools.partial(_run, cfg, params, bank, expert)
    begins = jnp.cumsum(lengths) - lengths
    tables = jnp.minimum(begins[:, None] + jnp.arange(width), pages - 1)
    state, scores = run(state, flat, jnp.zeros(count, jnp.int32), lengths, tables, jnp.arange(count) * beams, TILE)
    first = jnp.repeat(jnp.arange(count) * beams, beams)
    state = restore(state, jnp.arange(rows), snapshot(state, first))
    tables, starts = jnp.repeat(tables, beams, axis=0), jnp.repeat(lengths, beams)
    alone = jnp.where(jnp.arange(beams) == 0, 0.0, -jnp.inf)
    best = _empty(count, beams, steps, scores.dtype, alone)
    best, _ = _grow(best, jnp.repeat(scores, beams, axis=0), ended, 0, steps, penalty)

    def go_on(carry):
        i, best, *_ = carry
        bound = jnp.max(best.total, axis=1) / steps**penalty
        return (i < steps) & jnp.any(bound > best.done[:, -1])

    def step(carry):
        i, best, state, tables = carry
        fresh = size + (i - 1) * rows + jnp.arange(rows)
        at = starts + i - 1
        tables = tables.at[jnp.arange(rows), at].set(fresh)
        tokens = best.tokens[:, :, i - 1].reshape(-1)
        state, scores = run(state, tokens, at, jnp.ones(rows, jnp.int32), tables, jnp.arange(rows), 1)
        best, parents = _grow(best, scores, ended, i, steps, penalty)
        rank = (jnp.arange(count)[:, None] * beams + parents).reshape(-1)
        return i + 1, best, restore(state, jnp.arange(rows), snapshot(state, rank)), tables[rank]

    i, best, *_ = jax.lax.while_loop(go_on, step, (jnp.int32(1), best, state, tables))
    return best, i - 1


def _empty(count: int, beams: int, steps: int, dtype, alone: Float[Array, "W"]) -> _Beams:
    """The beginning: one hypothesis that says nothing."""
    tokens, none = jnp.zeros((count, beams, steps), jnp.int32), jnp.full((count, beams), -jnp.inf, dtype)
    total = jnp.broadcast_to(alone.astype(dtype), (count, beams))
    return _Beams(tokens, total, none, tokens, none, jnp.zeros((count, beams), jnp.int32))


def _run(cfg, params, bank, expert, state: DecodeState, tokens, starts, lengths, tables, slots, tile: int):
    """(state, log p [rows V] of what follows each row's last token)."""
    tables = jnp.broadcast_to(tables, (len(cfg.kinds), *tables.shape))
    how = dict(tokens=tokens.shape[0], tile=tile, page_size=1, slots=slots)
    ids = jnp.full(tokens.shape, expert)
    experts = {} if bank is None else dict(bank=bank, route=Route.of(ids))
    out = transformer.apply(cfg, params, tokens, ragged(starts, lengths, tables, **how), state, **experts)
    last = jnp.cumsum(lengths) - 1
    head = {} if bank is None else dict(bank=bank, ids=ids[last])
    return out.state, jax.nn.log_softmax(transformer.logits(cfg, params, out.hidden[last], **head), axis=-1)


def _grow(
    best: _Beams, scores: Float[Array, "BW V"], ended: Bool[Array, "V"], i, steps: int, penalty: float
) -> tuple[_Beams, Int[Array, "B W"]]:
    """All hypotheses by their token i, and each one's parent."""
    count, beams, _ = best.tokens.shape
    total = best.total[:, :, None] + scores.reshape(count, beams, -1)
    value, at = jax.lax.top_k(total.reshape(count, -1), beams)
    parents, token = at // scores.shape[1], at % scores.shape[1]
    tokens = jnp.take_along_axis(best.tokens, parents[:, :, None], axis=1).at[:, :, i].set(token)
    stopped = ended[token]
    over = stopped | (i + 1 == steps)
    length = jnp.where(stopped, i + 1, -(i + 1))
    best = _kept(best, jnp.where(over, value, -jnp.inf), tokens, length, i + 1, penalty)
    return dataclasses.replace(best, tokens=tokens, total=jnp.where(over, -jnp.inf, value)), parents


def _kept(best: _Beams, total, tokens, length, size, penalty: float) -> _Beams:
    """The best of those that had ended and of those that now have."""
    score = jnp.concatenate([best.done, total / jnp.asarray(size, total.dtype) ** penalty], axis=1)
    done, order = jax.lax.top_k(score, best.done.shape[1])
    pick = lambda old, new: jnp.take_along_axis(jnp.concatenate([old, new], axis=1), order, axis=1)
    texts = jnp.concatenate([best.done_tokens, tokens], axis=1)
    return dataclasses.replace(
        best,
        done=done,
        done_tokens=jnp.take_along_axis(texts, order[:, :, None], axis=1),
        done_total=pick(best.done_total, total),
        done_length=pick(best.done_length, length),
    )
