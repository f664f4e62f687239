"""Next-token losses that never hold the scores of the whole vocabulary: [N V] exists only a chunk at a time.

Tokens that do not count, such as those of a prompt, have no scores at all.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from molora_jax.adapters.bank import Bank
from molora_jax.config import ModelConfig, UserError
from molora_jax.data.batch import Batch
from molora_jax.training.batch import next_tokens
from molora_jax.typing import Array, Bool, Float, Int, Params

SCORES = 2**20
"""Scores that are alive at a time, 4 MiB in fp32: on two CPU cores 1.4 × as fast as 16 MiB, and as fast as all."""
TILE = 256
"""Tokens that are passed over together where none of them counts; with many tokens, a 32nd of them."""


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
    score, log_z, highest = token_scores(hidden, head(cfg, params, bank), targets, where=weights != 0)
    weights = weights.astype(score.dtype)
    loss = log_z - score
    if z_loss:
        loss = loss + z_loss * log_z**2
    weight = jnp.sum(weights)
    return Sums(jnp.sum(weights * loss), weight, {"accuracy": jnp.sum(weights * (score >= highest))})


def head(cfg: ModelConfig, params: Params, bank: Bank | None = None) -> Float[Array, "V D"]:
    """The weights of the output projection, which may be the embedding's."""
    if bank is not None and ("head" in bank.ends or "head" in bank.whole):
        raise UserError(
            "loss: got a bank with experts of the head, expected experts of the layers: leave head out of its sites"
        )
    return (params["embed"] if cfg.tied else params["head"])["weight"]


def token_scores(
    hidden: Float[Array, "N D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "N"],
    *,
    where: Bool[Array, "N"] | None = None,
    chunk: int | None = None,
) -> tuple[Float[Array, "N"], Float[Array, "N"], Float[Array, "N"]]:
    """(s, log Z, max s) of each token: its target's score, log Σ_v exp s_v over all scores, and the highest of them.

    The target's log-probability is s - log Z, and it is the greedy choice where s is the highest. Everything is in fp32
    (or wider). Differentiable once, by reverse mode, in s and log Z. The gradient of `hidden` needs no second pass over
    the vocabulary: ∂log Z/∂h = Σ_v p_v W_v is summed beside Z, as attention sums values (Milakov & Gimelshein 2018,
    alg. 3). A head that is differentiated is: its scores are computed again, chunk by chunk.

    Args:
      where: tokens that are wanted; the others have zeros, and on a single device cost next to nothing.
      chunk: columns of the vocabulary at a time; by default as many as keep to `SCORES`.
    """
    rows, vocab = max(hidden.shape[0], 1), head.shape[0]
    chosen = None if where is None or rows <= TILE or _several_devices() else where
    chunk = min(vocab, chunk or max(SCORES // (rows if chosen is None else _tile(rows)), 256))
    found = _token_scores(chunk, hidden, head, targets, chosen)
    return found if where is None else tuple(jnp.where(where, value, 0) for value in found)


def _several_devices() -> bool:
    """Whether tokens may lie on several devices, between which sorting them would move them."""
    return math.prod(jax.sharding.get_abstract_mesh().shape.values()) > 1


def _tile(rows: int) -> int:
    return max(TILE, rows // 32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_scores(chunk: int, hidden, head, targets, where):
    return _chosen(chunk, hidden, head, targets, where)[:3]


def _chosen(chunk: int, hidden, head, targets, where, **how):
    """`_summed` of the tokens in `where`, which come first in tiles; those without any are passed over."""
    if where is None:
        return _summed(chunk, hidden, head, targets, **how)
    rows, tile = len(where), _tile(len(where))
    order, count = jnp.argsort(~where, stable=True), jnp.sum(where)
    starts = jnp.arange(0, rows, tile)
    places = jnp.pad(order, (0, len(starts) * tile - rows)).reshape(-1, tile)

    def one(start, own):
        run = lambda: _summed(chunk, hidden[own], head, targets[own], **how)
        score, log_z, *rest = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(run))
        none = (score, log_z + jnp.inf, *rest)  # p = exp(s - log Z) of the backward pass is then 0
        return jax.lax.cond(start < count, run, lambda: none)

    def back(found):
        flat = found.reshape(-1, *found.shape[2:])[:rows]
        return jnp.zeros_like(flat).at[order].set(flat)

    return jax.tree.map(back, jax.lax.map(lambda args: one(*args), (starts, places)))


def _summed(chunk: int, hidden, head, targets, *, with_mean: bool = False):
    """(s, log Z, max s, Σ_v p_v W_v [N D] or None)."""
    rows, wide = hidden.shape[0], _wide(hidden)

    def add(i, carry):
        top, total, score, mean = carry
        first, columns, weights, scores = _chunk(chunk, i, hidden, head)
        mine = targets - columns[0]
        here = (targets >= first) & (targets < columns[0] + chunk)
        own = jnp.take_along_axis(scores, jnp.clip(mine, 0, chunk - 1)[:, None], axis=1)[:, 0]
        new = jnp.maximum(top, jnp.max(scores, axis=1))
        fade, terms = jnp.exp(top - new), jnp.exp(scores - new[:, None])
        total = total * fade + jnp.sum(terms, axis=1)
        if with_mean:
            terms = terms.astype(hidden.dtype)
            mean = mean * fade[:, None] + jnp.einsum("nv,vd->nd", terms, weights, preferred_element_type=wide)
        return new, total, jnp.where(here, own, score), mean

    zeros = jnp.zeros(rows, wide)
    mean = jnp.zeros(hidden.shape, wide) if with_mean else None
    init = (jnp.full(rows, -jnp.inf, wide), zeros, zeros, mean)
    top, total, score, mean = jax.lax.fori_loop(0, -(-head.shape[0] // chunk), add, init)
    return score, top + jnp.log(total), top, mean / total[:, None] if with_mean else None


def _chunk(chunk: int, i, hidden, head):
    """(first new column, columns, weights, scores [N chunk]); the last reaches back, hiding what was before."""
    first = i * chunk
    start = jnp.minimum(first, head.shape[0] - chunk)
    columns = start + jnp.arange(chunk)
    weights = jax.lax.dynamic_slice_in_dim(head, start, chunk)
    scores = jnp.einsum("nd,vd->nv", hidden, weights, preferred_element_type=_wide(hidden))
    return first, columns, weights, jnp.where(columns >= first, scores, -jnp.inf)


def _wide(hidden):
    return jnp.promote_types(hidden.dtype, jnp.float32)


def _forward(chunk, hidden, head, targets, where):
    values = hidden.value, head.value, targets.value
    score, log_z, top, mean = _chosen(chunk, *values, where and where.value, with_mean=hidden.perturbed)
    return (score, log_z, top), (*values, log_z, mean, head.perturbed)


def _backward(chunk, residuals, cotangents):
    """With p = exp(s - log Z): dh = dlogZ · Σ_v p_v W_v + ds · W_target; dW_v = (p_v · dlogZ + [v = target] · ds) h."""
    hidden, head, targets, log_z, mean, want_head = residuals
    zero = lambda g: jnp.zeros(g.shape, g.dtype) if isinstance(g, jax.custom_derivatives.SymbolicZero) else g
    d_score, d_log_z = (zero(g)[:, None] for g in cotangents[:2])
    wide = _wide(hidden)

    def add(i, d_head):
        first, columns, _, scores = _chunk(chunk, i, hidden, head)
        seen = (columns >= first) & (columns == targets[:, None])
        d_scores = jnp.exp(scores - log_z[:, None]) * d_log_z + jnp.where(seen, d_score, 0)
        old = jax.lax.dynamic_slice_in_dim(d_head, columns[0], chunk)
        new = old + jnp.einsum("nv,nd->vd", d_scores.astype(hidden.dtype), hidden, preferred_element_type=wide)
        return jax.lax.dynamic_update_slice_in_dim(d_head, new, columns[0], 0)

    d_hidden = d_head = None
    if mean is not None:
        d_hidden = (d_log_z * mean + d_score * head[targets].astype(wide)).astype(hidden.dtype)
    if want_head:
        d_head = jax.lax.fori_loop(0, -(-head.shape[0] // chunk), add, jnp.zeros(head.shape, wide)).astype(head.dtype)
    return d_hidden, d_head, None, None


_token_scores.defvjp(_forward, _backward, symbolic_zeros=True)
