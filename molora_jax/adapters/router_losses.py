"""Auxiliary losses of routers, on the scores that a run's trace holds; each is a mean over tokens and layers."""

import jax
import jax.numpy as jnp

from molora_jax.adapters.router import row_of_token
from molora_jax.adapters.selection import best_k
from molora_jax.nn.layout import Dense
from molora_jax.typing import Array, Bool, Float, Int


def load_balance(scores: Float[Array, "*L N J"], valid: Bool[Array, "N"] | None = None, k: int = 1):
    """J Σ_i f_i P_i: f the shares of the tokens' k best experts, P the mean probabilities; 1 when even.

    (Fedus et al. 2021, eq. 4-6; the aux loss of MixLoRA, Li et al. 2024, eq. 8.) f carries no gradient.
    """
    share = _mean(best_k(scores, k) / k, valid)
    return jnp.mean(scores.shape[-1] * jnp.sum(jax.lax.stop_gradient(share) * _mean(_softmax(scores), valid), axis=-1))


def z_loss(scores: Float[Array, "*L N J"], valid: Bool[Array, "N"] | None = None):
    """The mean of log² Σ exp(scores), which keeps scores small (Zoph et al. 2022, eq. 5)."""
    return jnp.mean(_mean(jax.nn.logsumexp(scores, axis=-1, keepdims=True) ** 2, valid))


def entropy(scores: Float[Array, "*L N J"], valid: Bool[Array, "N"] | None = None):
    """The mean entropy of softmax(scores), in nats."""
    log_p = jax.nn.log_softmax(scores, axis=-1)
    return jnp.mean(_mean(-jnp.sum(jnp.exp(log_p) * log_p, axis=-1, keepdims=True), valid))


def impurity(scores: Float[Array, "*L N J"], valid: Bool[Array, "N"] | None = None):
    """Gini's 1 - Σ_i p_i² of each token: zero where one expert has all (Molavi et al. 2026, consistency of tokens)."""
    return jnp.mean(_mean(1 - jnp.sum(_softmax(scores) ** 2, axis=-1, keepdims=True), valid))


def consistency(scores: Float[Array, "*L N J"], layout: Dense):
    """Gini's 1 - Σ_i p̄_i² of the mean probabilities of each row (of each document, where packed): zero where all its
    tokens have one expert and no other (Molavi et al. 2026, consistency of sequences)."""
    rows, valid = row_of_token(layout), layout.valid.reshape(-1)
    total = lambda v: jax.ops.segment_sum(jnp.where(valid[:, None], v, 0), rows, len(rows))
    count = total(jnp.ones((len(rows), 1), scores.dtype))
    mean = lambda p: total(p) / jnp.maximum(count, 1)
    flat = _softmax(scores).reshape(-1, *scores.shape[-2:])
    gini = jax.vmap(lambda p: 1 - jnp.sum(mean(p) ** 2, axis=-1))(flat)
    real = count[:, 0] > 0
    return jnp.mean(jnp.sum(jnp.where(real, gini, 0), axis=-1) / jnp.maximum(jnp.sum(real), 1))


def product_balance(scores: Float[Array, "*L N J"], valid: Bool[Array, "N"] | None = None):
    """-log Π_i q_i, q the mean probabilities over layers and tokens (Wu et al. 2024, MoLE, eq. 8)."""
    mean = _mean(_softmax(scores), valid)
    return -jnp.sum(jnp.log(jnp.mean(mean.reshape(-1, mean.shape[-1]), axis=0)))


def localized_balance(
    weights: Float[Array, "*L N J"],
    layout: Dense,
    expert_types: Int[Array, "J"],
    row_types: Int[Array, "B"],
    delta: float = 0.1,
):
    """σ²/μ of Z = I ⊙ Q (Dou et al. 2023, LoRAMoE, eq. 5-7), a mean over layers.

    Q [B J] sums an expert's weights over the valid tokens of a row; I is 1 + delta where the expert is of the row's
    type, else 1 - delta. So experts of one type share its rows evenly.
    """
    sums = jnp.where(layout.valid.reshape(-1)[:, None], weights, 0)
    importance = jnp.sum(sums.reshape(-1, *layout.shape, weights.shape[-1]), axis=-2)
    own = jnp.where(row_types[:, None] == expert_types, 1 + delta, 1 - delta)
    z = importance * own
    return jnp.mean(jnp.var(z, axis=(-2, -1)) / jnp.mean(z, axis=(-2, -1)))


def _softmax(scores):
    return jax.nn.softmax(scores, axis=-1)


def _mean(values: Float[Array, "*L N J"], valid: Bool[Array, "N"] | None) -> Float[Array, "*L J"]:
    if valid is None:
        return jnp.mean(values, axis=-2)
    values = jnp.where(valid[:, None], values, 0)
    return jnp.sum(values, axis=-2) / jnp.maximum(jnp.sum(valid), 1)
