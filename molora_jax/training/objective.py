"""Next-token losses that never hold the scores of the whole vocabulary: [N V] exists only a chunk at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from molora_jax.adapters.bank import Bank
from molora_jax.config import ModelConfig, UserError
from molora_jax.data.batch import Batch
from molora_jax.training.batch import next_tokens
from molora_jax.typing import Array, Float, Int, Params

SCORES = 2**20
"""Scores that are alive at a time, 4 MiB in fp32: on two CPU cores 1.4 × as fast as 16 MiB, and as fast as all."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """A loss before it is averaged, so that parts of a batch add up to exactly the whole.

    Attributes:
      loss: Σ w·loss over the tokens; what is differentiated.
      weight: Σ w, which depends on no parameter.
      extra: further sums over the same tokens, to be shown as averages.
    """

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    extra: dict[str, Float[Array, ""]] = dataclasses.field(default_factory=dict)


def next_token_loss(
    cfg: ModelConfig,
    params: Params,
    hidden: Float[Array, "N D"],
    batch: Batch,
    *,
    bank: Bank | None = None,
    z_loss: float = 0.0,
) -> Sums:
    """Σ w (log Z - s_target + z_loss · log² Z) over the tokens of a batch, from the decoder's output.

    The z-loss keeps log Z near 0 (Chowdhery et al. 2022, PaLM §5). `extra` has "accuracy", of greedy prediction.

    Raises:
      UserError: `bank` has experts of the head, whose scores this does not compute.
    """
    targets, weights = next_tokens(batch)
    score, log_z, best = token_scores(hidden, head(cfg, params, bank), targets)
    weights = weights.astype(score.dtype)
    loss = log_z - score
    if z_loss:
        loss = loss + z_loss * log_z**2
    weight = jnp.sum(weights)
    return Sums(jnp.sum(weights * loss), weight, {"accuracy": jnp.sum(weights * (best == targets))})


def head(cfg: ModelConfig, params: Params, bank: Bank | None = None) -> Float[Array, "V D"]:
    """The weights of the output projection, which may be the embedding's."""
    if bank is not None and ("head" in bank.ends or "head" in bank.whole):
        raise UserError(
            "loss: got a bank with experts of the head, expected experts of the layers: leave head out of its sites"
        )
    return (params["embed"] if cfg.tied else params["head"])["weight"]


def token_scores(
    hidden: Float[Array, "N D"], head: Float[Array, "V D"], targets: Int[Array, "N"], *, chunk: int | None = None
) -> tuple[Float[Array, "N"], Float[Array, "N"], Int[Array, "N"]]:
    """(s, log Z, argmax) of each token: its target's score, log Σ_v exp s_v over all scores, and the best of them.

    The target's log-probability is s - log Z. Everything is in fp32 (or wider). The backward pass computes the scores
    again, chunk by chunk; a head that is not differentiated costs it nothing. Differentiable once, by reverse mode.

    Args:
      chunk: columns of the vocabulary at a time; by default as many as keep to `SCORES`.
    """
    rows, vocab = max(hidden.shape[0], 1), head.shape[0]
    chunk = min(vocab, chunk or max(SCORES // rows, 256))
    return _token_scores(chunk, hidden, head, targets)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_scores(chunk: int, hidden, head, targets):
    rows, wide = hidden.shape[0], _wide(hidden)

    def add(i, carry):
        top, total, score, best = carry
        first, columns, scores = _chunk(chunk, i, hidden, head)
        mine = targets - columns[0]
        here = (targets >= first) & (targets < columns[0] + chunk)
        own = jnp.take_along_axis(scores, jnp.clip(mine, 0, chunk - 1)[:, None], axis=1)[:, 0]
        highest = jnp.max(scores, axis=1)
        best = jnp.where(highest > top, columns[jnp.argmax(scores, axis=1)], best)
        new = jnp.maximum(top, highest)
        total = total * jnp.exp(top - new) + jnp.sum(jnp.exp(scores - new[:, None]), axis=1)
        return new, total, jnp.where(here, own, score), best

    zeros = jnp.zeros(rows, wide)
    init = (jnp.full(rows, -jnp.inf, wide), zeros, zeros, jnp.zeros(rows, targets.dtype))
    top, total, score, best = jax.lax.fori_loop(0, -(-head.shape[0] // chunk), add, init)
    return score, top + jnp.log(total), best


def _chunk(chunk: int, i, hidden, head):
    """(first new column, columns, scores [N chunk]); the last chunk reaches back, and hides what was there before."""
    first = i * chunk
    start = jnp.minimum(first, head.shape[0] - chunk)
    columns = start + jnp.arange(chunk)
    weights = jax.lax.dynamic_slice_in_dim(head, start, chunk)
    scores = jnp.einsum("nd,vd->nv", hidden, weights, preferred_element_type=_wide(hidden))
    return first, columns, jnp.where(columns >= first, scores, -jnp.inf)


def _wide(hidden):
    return jnp.promote_types(hidden.dtype, jnp.float32)


def _forward(chunk, hidden, head, targets):
    out = _token_scores(chunk, hidden.value, head.value, targets.value)
    return out, (hidden.value, head.value, targets.value, out[1], hidden.perturbed, head.perturbed)


def _backward(chunk, residuals, cotangents):
    """With p = exp(s - log Z): ds_v = p_v · dlogZ + [v = target] · ds; dh = ds W, dW = dsᵀ h."""
    hidden, head, targets, log_z, want_hidden, want_head = residuals
    zero = lambda g: jnp.zeros(g.shape, g.dtype) if isinstance(g, jax.custom_derivatives.SymbolicZero) else g
    d_score, d_log_z = (zero(g)[:, None] for g in cotangents[:2])
    wide = _wide(hidden)

    def add(i, carry):
        d_hidden, d_head = carry
        first, columns, scores = _chunk(chunk, i, hidden, head)
        seen = (columns >= first) & (columns == targets[:, None])
        d_scores = jnp.exp(scores - log_z[:, None]) * d_log_z + jnp.where(seen, d_score, 0)
        d_scores = d_scores.astype(hidden.dtype)
        if want_hidden:
            weights = jax.lax.dynamic_slice_in_dim(head, columns[0], chunk)
            d_hidden += jnp.einsum("nv,vd->nd", d_scores, weights, preferred_element_type=wide)
        if want_head:
            old = jax.lax.dynamic_slice_in_dim(d_head, columns[0], chunk)
            new = old + jnp.einsum("nv,nd->vd", d_scores, hidden, preferred_element_type=wide)
            d_head = jax.lax.dynamic_update_slice_in_dim(d_head, new, columns[0], 0)
        return d_hidden, d_head

    empty = lambda like, want: jnp.zeros(like.shape, wide) if want else None
    init = (empty(hidden, want_hidden), empty(head, want_head))
    d_hidden, d_head = jax.lax.fori_loop(0, -(-head.shape[0] // chunk), add, init)
    cast = lambda g, like: None if g is None else g.astype(like.dtype)
    return cast(d_hidden, hidden), cast(d_head, head), None


_token_scores.defvjp(_forward, _backward, symbolic_zeros=True)
