"""Policy-gradient losses over rollouts: clipped ratios of new to old probabilities, and the distance to a reference."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from molora_jax.config import ModelConfig
from molora_jax.training.algorithms import Algorithm
from molora_jax.training.batch import next_tokens
from molora_jax.training.experience import Experience
from molora_jax.training.objective import Sums, head, token_scores
from molora_jax.training.step import Loss
from molora_jax.typing import Array, Bool, Float

Decode = Callable[[Any, Experience], Float[Array, "N D"]]
"""(tree, batch) to the decoder's output at all B·T tokens; with the experts of `batch.choices`, where it has them."""

LOG_RATIO = 20.0
"""Log-ratios are cut to ±20, so that none overflows."""


def loss(cfg: ModelConfig, how: Algorithm, decode: Decode, *, temperature: float = 1.0, beta: float = 0.0) -> Loss:
    """The algorithm's mean of surrogate + β · KL, of a tree {"params": …, …}.

    `extra` has "clip_share", of the tokens whose gradient the clipping stopped, and "kl" where there is a reference.

    Args:
      temperature: at which the rollouts were drawn; the scores are divided by it.
      beta: weight of the KL to the reference, which the batch must have then.
    """

    def of(tree: Any, batch: Experience, key: Array) -> Sums:
        new = logprobs(cfg, decode, tree, batch, temperature=temperature)
        old = jax.lax.stop_gradient(new) if batch.logprobs is None else batch.logprobs
        terms, clipped = surrogate(how, new, old, batch.advantages, batch.sampled)
        extra = dict(clip_share=jnp.sum(batch.each * clipped))
        if batch.reference is not None:
            away = kl(new, batch.reference)
            terms, extra["kl"] = terms + beta * away, jnp.sum(batch.each * away)
        return Sums(jnp.sum(batch.weights * terms), jnp.sum(batch.share), extra)

    return of


def logprobs(
    cfg: ModelConfig, decode: Decode, tree: Any, batch: Experience, *, temperature: float = 1.0
) -> Float[Array, "B T"]:
    """log π of every sampled token given those before it, in fp32 (or wider); 0 for all other tokens.

    π is softmax(scores / temperature), what the engine draws from.
    """
    hidden = decode(tree, batch) / temperature
    targets, _ = next_tokens(batch)
    before = jnp.pad(batch.sampled[:, 1:], ((0, 0), (0, 1))).reshape(-1)
    score, log_z, _ = token_scores(hidden, head(cfg, tree["params"], tree.get("bank")), targets, where=before)
    found = jnp.pad((score - log_z).reshape(batch.tokens.shape)[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(batch.sampled, found, 0)


def surrogate(
    how: Algorithm,
    new: Float[Array, "B T"],
    old: Float[Array, "B T"],
    advantages: Float[Array, "B"],
    sampled: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Each token's loss, and whether the clipping stops its gradient; 0 and False where no token was sampled.

    With the ratio ρ = exp(new - old) of each token, its product or its geometric mean over the rollout:
    -min(ρ A, clip(ρ) A) (Schulman et al. 2017, PPO, eq. 7), or detached, -clip(ρ) A · new with a constant clip(ρ)
    (CISPO). A loss of the whole rollout is the same at each of its tokens, so that their mean is it.
    """
    low, high = 1 - how.low, 1 + how.high
    log_ratio = jnp.where(sampled, new - old, 0)
    if how.ratio != "token":
        total = jnp.sum(log_ratio, axis=1, keepdims=True)
        count = jnp.sum(sampled, axis=1, keepdims=True)
        log_ratio = jnp.broadcast_to(total / jnp.maximum(count, 1) if how.ratio == "mean" else total, new.shape)
    ratio = jnp.exp(jnp.clip(log_ratio, -LOG_RATIO, LOG_RATIO))
    cut, gain = jnp.clip(ratio, low, high), advantages[:, None]
    if how.detached:
        terms, clipped = -jax.lax.stop_gradient(cut) * gain * new, cut != ratio
    else:
        terms, clipped = -jnp.minimum(ratio * gain, cut * gain), cut * gain < ratio * gain
    return jnp.where(sampled, terms, 0), sampled & clipped


def kl(new: Float[Array, "*N"], reference: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """An estimate of KL(π ‖ reference) from tokens of π, never negative: e^d - d - 1, d = reference - new.

    The third of Schulman 2020, Approximating KL divergence; unbiased as it stands.
    """
    away = jnp.clip(reference - new, -LOG_RATIO, LOG_RATIO)
    return jnp.exp(away) - away - 1
