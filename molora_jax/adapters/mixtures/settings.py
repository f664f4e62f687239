"""Mixtures of the literature that are settings of a router, and the bounds that every comparison needs.

Their experts train together with the router in the papers; frozen ones serve as well.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from molora_jax.adapters.bank import Bank, Site
from molora_jax.adapters.route import Route
from molora_jax.adapters.router import Router, new_router
from molora_jax.adapters.selection import Placement, Rule
from molora_jax.typing import Array, Int


def loramoe(widths: Mapping[str, int], experts: int, layers: int, *, seed: int = 0) -> Router:
    """Σ_e softmax(W x)_e Δ_e with a W for every projection (Dou et al. 2023, §3.1; Zadouri et al. 2023 for T5).

    LoRAMoE's loss is `router_losses.localized_balance`.

    Args:
      widths: D of each projection, by its name.
    """
    return new_router(widths, experts, rule=Rule("soft"), layers=layers, seed=seed)


def hydra(widths: Mapping[str, int], experts: int, layers: int, *, seed: int = 0) -> Router:
    """HydraLoRA's router (Tian et al. 2024, eq. 5), which is LoRAMoE's; `tie_down` gives all experts one A."""
    return loramoe(widths, experts, layers, seed=seed)


def tie_down(bank: Bank) -> Bank:
    """The bank with the A of its first slot in all of them, which alone trains then: one A, E B's."""

    def tied(site: Site) -> Site:
        return dataclasses.replace(site, a=jnp.broadcast_to(site.a[..., :1, :, :], site.a.shape))

    return dataclasses.replace(bank, layers=jax.tree.map(tied, bank.layers, is_leaf=lambda v: isinstance(v, Site)))


def mixlora(width: int, experts: int, layers: int, *, k: int = 2, seed: int = 0) -> Router:
    """A softmax over the k best of each layer (Li et al. 2024, eq. 3-5); its loss is `router_losses.load_balance`."""
    return new_router(width, experts, rule=Rule("top_k", k=k), layers=layers, seed=seed)


def smear(width: int, experts: int, layers: int, *, seed: int = 0) -> Router:
    """One expert merged for each row, of factors weighted by the row's mean probabilities (Muqeeth et al. 2023, §3)."""
    rule = Rule("soft", factored=True)
    return new_router(width, experts, rule=rule, layers=layers, pooling="probabilities", seed=seed)


def uniform(slots: Sequence[int], size: int, tokens: int) -> Route:
    """All experts at equal weight: the mean of their updates."""
    placement = Placement(jnp.asarray(slots, jnp.int32), size)
    return Route.mixture(placement.spread(jnp.full((tokens, len(slots)), 1 / len(slots))))


def oracle(ids: Int[Array, "B"], length: int) -> Route:
    """The expert of each row's own domain for all its tokens."""
    return Route.of(jnp.repeat(jnp.asarray(ids), length))
