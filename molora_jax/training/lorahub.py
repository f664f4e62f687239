"""LoraHub's weights for a set of traces: tried on a few of them, without gradients."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.mixtures.lorahub import search
from molora_jax.adapters.mixtures.soups import Soup
from molora_jax.checkpoints.model import Model
from molora_jax.data.document import Document
from molora_jax.data.pipeline import Batches, Spec
from molora_jax.training import mixture
from molora_jax.typing import Array, Float


def searched(model: Model, experts: Sequence[Adapter], mixer: Soup, documents: Sequence[Document], config) -> Soup:
    """The soup of factors, one weight an expert in all layers, that makes the loss of the first batch small.

    Huang et al. 2023, §3: a few examples, and the search of `mixtures.lorahub`.

    Args:
      config: `compose.ComposeConfig`; `steps` weights are tried on one batch of `rows` rows.
    """
    batch = next(Batches({"traces": documents}, Spec(rows=config.rows, length=config.length, seed=config.seed)))
    tree = mixture.tree(model.params, experts, mixer, None)
    of = mixture.loss(model.cfg, config.mixture, mixer)

    @jax.jit
    def loss(tree, weights: Float[Array, "J"]) -> Float[Array, ""]:
        sums = of(tree | {"router": _weighed(mixer, weights)}, batch, jax.random.key(0))
        return sums.loss / sums.weight

    tried = lambda weights: float(loss(tree, jnp.asarray(weights, jnp.float32)))
    found = search(tried, len(experts), steps=config.steps, seed=config.seed)
    return dataclasses.replace(mixer, params=jax.tree.map(np.asarray, _weighed(mixer, found)["params"]))


def _weighed(mixer: Soup, weights: Float[Array, "J"]) -> dict:
    """The router's leaves with these weights in every layer."""
    return {"params": {"weight": jnp.broadcast_to(jnp.asarray(weights, jnp.float32), mixer.params["weight"].shape)}}
