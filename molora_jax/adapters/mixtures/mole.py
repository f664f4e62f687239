"""MoLE: a gate that looks at what the experts would add, not at what they are given."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from molora_jax.adapters.router import DATA, SETTINGS, Router, score
from molora_jax.adapters.selection import Placement, Rule
from molora_jax.typing import Array, Float


@functools.partial(jax.tree_util.register_dataclass, data_fields=DATA, meta_fields=SETTINGS)
@dataclasses.dataclass(frozen=True)
class Mole(Router):
    """Scores G · norm([Δ_1(x); …; Δ_J(x)]) at every site, mixed by softmax(scores/τ) (Wu et al. 2024, eq. 4-7).

    `norm` brings a token's concatenated outputs to mean 0 and variance 1. The paper flattens whole sequences, which
    ties a gate to one length; here each token has its own. τ (`temperature`) trains too. Its loss is
    `router_losses.product_balance`. All experts' outputs of all tokens are held at once.
    """

    def judge(self, key, x, site):
        return score(self.params[key], normalised(self.outputs(x, site))), None

    def outputs(self, x, site) -> Float[Array, "N J F"]:
        """Δ_e(x) of the router's experts; zero of one that is the base."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        slots = jnp.maximum(self.placement.slots, 0)
        a, b, scale = site.a[slots], site.b[slots], jnp.where(self.placement.slots < 0, 0, site.scale[slots])
        low = jnp.einsum("nd,jrd->njr", x, a, precision="highest", preferred_element_type=wide)
        y = jnp.einsum("njr,jrf->njf", low, b.astype(wide), precision="highest")
        y = y if site.bias is None else y + site.bias[slots].astype(wide)
        return y * scale[:, None].astype(wide)


def mole(outputs: Mapping[str, int], experts: int, layers: int, *, seed: int = 0) -> Mole:
    """A random gate for every site.

    Args:
      outputs: F of each site by its name.
    """
    keys = jax.random.split(jax.random.key(seed), len(outputs))
    draw = lambda key, f: jax.random.normal(key, (layers, experts, experts * f)) * (experts * f) ** -0.5
    return Mole(
        params={site: {"out": {"weight": draw(key, f)}} for key, (site, f) in zip(keys, outputs.items(), strict=True)},
        placement=Placement(jnp.arange(experts, dtype=jnp.int32), experts),
        rule=Rule("soft"),
        per_layer=True,
        per_site=True,
    )


def normalised(outputs: Float[Array, "N J F"], eps: float = 1e-6) -> Float[Array, "N JF"]:
    """All of a token's outputs in one vector of mean 0 and variance 1."""
    flat = outputs.reshape(len(outputs), -1)
    flat = flat - jnp.mean(flat, axis=-1, keepdims=True)
    return flat * jax.lax.rsqrt(jnp.mean(flat**2, axis=-1, keepdims=True) + eps)
