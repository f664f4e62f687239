"""The signals of one run, computed from its logits and hidden state; in fp32 or wider, plain jnp, for one request."""

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.routing.program import Program, Signals, TopK
from molora_jax.typing import Array, Bool, Float, Int


def log_probs(logits: Float[Array, "V"]) -> Float[Array, "V"]:
    """log softmax; -inf stays -inf."""
    return jax.nn.log_softmax(_wide(logits), axis=-1)


def entropy(logits: Float[Array, "V"]) -> Float[Array, ""]:
    """H = -Σ p log p of softmax(logits), in nats; tokens at -inf count nothing."""
    logs = log_probs(logits)
    return -jnp.sum(jnp.where(jnp.isneginf(logs), 0, jnp.exp(logs) * logs), axis=-1)


def max_prob(logits: Float[Array, "V"]) -> Float[Array, ""]:
    """The highest probability: 1/Σ exp(l - max l)."""
    wide = _wide(logits)
    return 1 / jnp.sum(jnp.exp(wide - jnp.max(wide, axis=-1, keepdims=True)), axis=-1)


def margin(logits: Float[Array, "V"]) -> Float[Array, ""]:
    """The highest probability minus the second highest, 0 when two tokens tie."""
    logs = log_probs(logits)
    first = jnp.argmax(logs, axis=-1)
    second = jnp.max(jnp.where(jnp.arange(logs.shape[-1]) == first, -jnp.inf, logs), axis=-1)
    return jnp.exp(logs[first]) - jnp.exp(second)


def logprob(logits: Float[Array, "V"], token: Int[Array, ""]) -> Float[Array, ""]:
    """log softmax(logits)[token]."""
    wide = _wide(logits)
    return wide[token] - jax.nn.logsumexp(wide, axis=-1)


def top_k(logits: Float[Array, "V"], k: int) -> TopK:
    """The k highest raw logits, descending, and their ids."""
    return TopK(*jax.lax.top_k(_wide(logits), k))


def pattern_hits(patterns: tuple[tuple[int, ...], ...], recent: Int[Array, "W"]) -> Bool[Array, "patterns"]:
    """For each pattern, whether `recent` (the last tokens, -1 in front of the first one) ends with it."""
    width = window(patterns)
    table = np.full((len(patterns), width), -1, np.int32)
    for row, pattern in zip(table, patterns, strict=True):
        row[width - len(pattern) :] = pattern
    tail = recent[recent.shape[0] - width :]
    return jnp.all((table == -1) | (table == tail), axis=-1)


def window(patterns: tuple[tuple[int, ...], ...]) -> int:
    """How many of the last tokens `pattern_hits` needs."""
    return max((len(pattern) for pattern in patterns), default=0)


def measure(
    program: Program, *, logits: Float[Array, "V"], token: Int[Array, ""], recent: Int[Array, "W"], **known
) -> Signals:
    """The signals that `program` declares, and no others.

    Args:
      logits: what the token was sampled from, before temperature and cuts.
      recent: the last `window(program.patterns)` tokens or more.
      known: the signals that need no computing, by name: position, since_handoff, mode, stop, hidden, span_logprobs,
        score, accepted.
    """
    computed = {
        "token": lambda: token,
        "entropy": lambda: entropy(logits),
        "max_prob": lambda: max_prob(logits),
        "margin": lambda: margin(logits),
        "logprob": lambda: logprob(logits, token),
        "top_k": lambda: top_k(logits, program.top_k),
        "pattern_hits": lambda: pattern_hits(program.patterns, recent),
    }
    return Signals(**{name: computed[name]() if name in computed else known[name] for name in program.signals})


def _wide(logits: Array) -> Array:
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
