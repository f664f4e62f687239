"""What a run's trace says of its routing, layer by layer."""

import jax
import jax.numpy as jnp

from molora_jax.adapters.route import Choice
from molora_jax.adapters.selection import Placement
from molora_jax.config import UserError
from molora_jax.nn.layout import Dense
from molora_jax.typing import Array, Bool, Float, Int


def measure(choice: Choice, placement: Placement, layout: Dense) -> dict[str, Float[Array, "*L"]]:
    """Means over the valid tokens, one a layer: the router's certainty, and what was chosen.

    `top_mass`: of the largest probability. `margin`: between the two largest. `entropy`: in nats. `load` [*L J]: share
    of tokens whose strongest expert it is. `switch_rate`: share of neighbours in a row whose strongest experts differ.

    Raises:
      UserError: the choice has no scores: no router made it.
    """
    if choice.scores is None:
        raise UserError("metrics: got a choice without scores, expected one that a router made")
    valid = layout.valid.reshape(-1)
    log_p = jax.nn.log_softmax(choice.scores, axis=-1)
    p = jnp.exp(log_p)
    two, _ = jax.lax.top_k(p, min(2, p.shape[-1]))
    ids = strongest(choice)
    mine = ids[..., None] == placement.slots
    return dict(
        top_mass=_mean(two[..., 0], valid),
        margin=_mean(two[..., 0] - (two[..., 1] if p.shape[-1] > 1 else 0), valid),
        entropy=_mean(-jnp.sum(p * log_p, axis=-1), valid),
        load=jnp.moveaxis(_mean(jnp.moveaxis(mine, -1, 0).astype(p.dtype), valid), 0, -1),
        switch_rate=switch_rate(ids, layout),
    )


def strongest(choice: Choice) -> Int[Array, "*L N"]:
    """The slot of each token's strongest expert, or `NONE`."""
    return choice.ids if choice.ids is not None else jnp.argmax(choice.weights, axis=-1)


def switch_rate(ids: Int[Array, "*L N"], layout: Dense) -> Float[Array, "*L"]:
    """Share of the valid tokens that have another expert than the valid token before them in their document."""
    rows, length = layout.shape
    places = jnp.where(layout.valid, jnp.arange(length), -1)
    before = jnp.pad(jax.lax.cummax(places, axis=1), ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    at = jnp.maximum(before, 0)
    pairs = layout.valid & (before >= 0) & (jnp.take_along_axis(layout.segments, at, 1) == layout.segments)
    last = jnp.take(ids, (at + jnp.arange(rows)[:, None] * length).reshape(-1), axis=-1)
    return _mean((last != ids).astype(jnp.float32), pairs.reshape(-1))


def _mean(values: Float[Array, "*L N"], valid: Bool[Array, "N"]) -> Float[Array, "*L"]:
    return jnp.sum(jnp.where(valid, values, 0), axis=-1) / jnp.maximum(jnp.sum(valid), 1)
