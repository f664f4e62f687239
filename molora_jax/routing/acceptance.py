"""How a verified draft is cut: rejection sampling towards any target distribution, and drawing a token from a mass."""

import jax
import jax.numpy as jnp

from molora_jax.routing.program import Draft
from molora_jax.typing import Array, Bool, Float, Int


def rejection(draft: Draft, target: Float[Array, "K+1 V"], key: Array) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Keeps a prefix of the draft and adds a token, so that every token is distributed as its row of `target`.

    Token x_i stays with probability min(1, π_i(x_i)/q_i(x_i)); at the first that does not, the token after the prefix
    is drawn from (π - q)₊, and after a draft kept whole from π (Leviathan et al. 2023, algorithm 1, whose π is p).
    """
    rows = jnp.arange(draft.tokens.shape[0])
    uniform = jax.random.uniform(key, (rows.size + 1,))
    wanted, had = target[rows, draft.tokens], draft.q[rows, draft.tokens]
    count = leading(uniform[:-1] * had < wanted, draft.count)
    row = target[count]
    cut = jnp.where(count < draft.count, draft.q[jnp.minimum(count, rows.size - 1)], 0)
    rest = jnp.maximum(row - cut, 0)
    # rounding may reject where π and q agree, which leaves no rest
    return count, draw(jnp.where(jnp.sum(rest) > 0, rest, row), uniform[-1])


def leading(stays: Bool[Array, "K"], count: Int[Array, ""]) -> Int[Array, ""]:
    """How many of the first `count` entries come before the first that is False."""
    return jnp.sum(jnp.cumprod(stays & (jnp.arange(stays.shape[0]) < count))).astype(jnp.int32)


def draw(mass: Float[Array, "V"], uniform: Float[Array, ""]) -> Int[Array, ""]:
    """The token at which the running sum of `mass` passes `uniform` of its total; never one without mass."""
    sums = jnp.cumsum(mass)
    passed = jnp.searchsorted(sums, uniform * sums[-1], side="right")
    last = jnp.max(jnp.where(mass > 0, jnp.arange(mass.shape[0]), 0))
    return jnp.minimum(passed, last).astype(jnp.int32)
