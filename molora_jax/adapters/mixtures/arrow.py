"""Arrow: routes without training, by how well an input lies along what each expert's update responds to most."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters.adapter import Adapter, LoRAWeights
from molora_jax.adapters.router import DATA, SETTINGS, Router
from molora_jax.adapters.selection import Placement, Rule
from molora_jax.adapters.spec import site_name
from molora_jax.config import UserError
from molora_jax.typing import Float


@functools.partial(jax.tree_util.register_dataclass, data_fields=DATA, meta_fields=SETTINGS)
@dataclasses.dataclass(frozen=True)
class Arrow(Router):
    """Scores |v_e·x| at every site, v_e the top right singular vector of B_e A_e (Ostapenko et al. 2024, §3.2).

    An expert that leaves a site alone is not chosen there, and takes no weight from the others.

    Attributes:
      params: the prototypes v_e by site, {"weight": [L J D]}; zero where the expert has none.
    """

    def scores(self, x, site=None):
        return jnp.abs(super().scores(x, site))

    def judge(self, key, x, site):
        scores = self.scores(x, key)
        return scores, jnp.broadcast_to(jnp.any(self.params[key]["out"]["weight"] != 0, axis=-1), scores.shape)


def arrow(adapters: Sequence[Adapter], *, k: int, temperature: float = 1.0) -> Arrow:
    """Of adapters in the first slots of a bank: a softmax over the k best of each token and site.

    Raises:
      UserError: k exceeds their number, or they are of different bases.
    """
    if not 1 <= k <= len(adapters):
        raise UserError(f"arrow: got k={k} of {len(adapters)} experts, expected 1 to as many")
    paths = [path for path in dict.fromkeys(p for adapter in adapters for p in adapter.sites) if path[0] == "layers"]
    params = {site_name(path): {"out": {"weight": _prototypes(adapters, path)}} for path in paths}
    return Arrow(
        params=params,
        placement=Placement(jnp.arange(len(adapters), dtype=jnp.int32), len(adapters)),
        rule=Rule("top_k", k=k),
        temperature=temperature,
        per_layer=True,
        per_site=True,
    )


def _prototypes(adapters: Sequence[Adapter], path) -> np.ndarray:
    columns = [adapter.sites.get(path) for adapter in adapters]
    shapes = {(len(column), w.a.shape[1]) for column in columns if column for w in column if w is not None}
    if len(shapes) != 1:
        raise UserError(f"arrow: got (layers, width) {sorted(shapes)} at {site_name(path)}, expected those of one base")
    layers, width = shapes.pop()
    found = np.zeros((layers, len(adapters), width), np.float32)
    for e, column in enumerate(columns):
        for layer, weights in enumerate(column or ()):
            if weights is not None:
                found[layer, e] = prototype(weights)
    return found


def prototype(weights: LoRAWeights) -> Float[np.ndarray, "D"]:
    """The top right singular vector of B A, by way of the small core of the product; zero if the product is."""
    basis, upper = np.linalg.qr(weights.a.astype(np.float64).T)
    _, values, right = np.linalg.svd(weights.b.astype(np.float64) @ upper.T, full_matrices=False)
    return basis @ right[0] * (values[0] > 0)
