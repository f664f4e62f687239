"""The same model with fewer layers: a small one for a large one, with its vocabulary and its weights."""

import dataclasses

import jax
import jax.numpy as jnp

from molora_jax.config import ModelConfig, UserError
from molora_jax.typing import Params


def without_layers(cfg: ModelConfig, params: Params, first: int, last: int) -> tuple[ModelConfig, Params]:
    """Leaves out the layers `first` to `last`, both included and counted from 0; all weights are those of `params`.

    Unrolled layers are shared. Stacked ones have to lie together, so that those that stay are copied. The residual
    stream of neighbouring layers is so alike that a model without a few of them still writes text (Gromov et al. 2024,
    arXiv 2403.17887, §3); it is the small model of a pair where none of the large one's vocabulary is at hand.

    Raises:
      UserError: layers that the model does not have, or none left.
    """
    if not 0 <= first <= last < cfg.layers or last - first + 1 == cfg.layers:
        raise UserError(
            f"drop_layers: got {first}-{last}, expected FIRST-LAST within 0-{cfg.layers - 1}, and a layer left"
        )
    keep = lambda layers: [*layers[:first], *layers[last + 1 :]]
    windows = tuple(keep(cfg.windows))
    layers = params["layers"]
    if isinstance(layers, list):
        kept = keep(layers)
    else:
        kept = jax.tree.map(lambda leaf: jnp.concatenate([leaf[:first], leaf[last + 1 :]]), layers)
    return dataclasses.replace(cfg, layers=len(windows), windows=windows), {**params, "layers": kept}
