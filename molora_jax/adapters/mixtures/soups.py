"""LoRA Soups: one weight for each expert and layer, and the adapter that the weighted experts sum to."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters import merge
from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.router import DATA, SETTINGS, Router
from molora_jax.adapters.selection import Placement, Rule, with_given
from molora_jax.config import UserError
from molora_jax.typing import Array, Float


@functools.partial(jax.tree_util.register_dataclass, data_fields=DATA, meta_fields=SETTINGS)
@dataclasses.dataclass(frozen=True)
class Soup(Router):
    """Σ_e w_e Δ_e with the layer's w, the same for all tokens (Prabhakar et al. 2024, CAT, eq. 4).

    Attributes:
      params: {"weight": [L J]}.
    """

    def decide(self, key, x, site, given, layout, pool=None):
        weights = jnp.broadcast_to(self.params["weight"], (x.shape[1], len(self.placement.slots)))
        return with_given(self.placement.spread(weights), given, factored=self.rule.factored)


def soup(experts: int, layers: int, *, factored: bool = False) -> Soup:
    """Equal weights, to train; `factored` weighs the factors A and B apart, as LoraHub does (see `lorahub`)."""
    return Soup(
        params={"weight": jnp.full((layers, experts), 1 / experts)},
        placement=Placement(jnp.arange(experts, dtype=jnp.int32), experts),
        rule=Rule("soft", factored=factored),
        per_layer=True,
    )


def concatenated(adapters: Sequence[Adapter], weights: Float[Array, "L E"], *, name: str) -> Adapter:
    """The one adapter that does what the soup does, exactly: the experts' factors side by side.

    Raises:
      UserError: other numbers of experts or layers, or adapters that are no sums (see `merge.combine`).
    """
    weights = np.asarray(weights)
    if weights.ndim != 2 or weights.shape[1] != len(adapters):
        raise UserError(
            f"soup: got weights {weights.shape} for {len(adapters)} adapters, expected [L, {len(adapters)}]"
        )

    def scaled(adapter: Adapter, column: np.ndarray) -> Adapter:
        sites = {}
        if adapter.full or any(update.magnitude is not None for _, _, update in adapter.weights()):
            raise UserError(f"soup: got {adapter.name!r} with DoRA or whole weights, expected plain updates to sum")
        for path, updates in adapter.sites.items():
            if path[0] != "layers" or len(updates) != len(column):
                raise UserError(
                    f"soup: got {'.'.join(path)} with {len(updates)} layers in {adapter.name!r}, expected a projection "
                    f"of {len(column)} layers, as the weights"
                )
            by_layer = zip(updates, column, strict=True)
            sites[path] = tuple(u and dataclasses.replace(u, alpha=u.alpha * float(w)) for u, w in by_layer)
        return dataclasses.replace(adapter, sites=sites)

    weighted = [scaled(adapter, column) for adapter, column in zip(adapters, weights.T, strict=True)]
    return merge.combine(weighted, [1.0] * len(adapters), name=name, method="cat")
