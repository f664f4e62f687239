"""DoRA in a bank while it trains: magnitudes of its experts, and the growth that follows from them at every step."""

import dataclasses

import jax
import jax.numpy as jnp

from molora_jax.adapters.bank import Bank, Site
from molora_jax.config import UserError
from molora_jax.typing import Array, Float, Params


def magnitudes(params: Params, bank: Bank) -> Params:
    """m of every site and expert, [L E F], as a tree {"attn": {"q_proj": …}}: what to train beside the factors.

    Raises:
      UserError: the bank has no room for DoRA, or its layers are unrolled.
    """
    found = {}
    for block, name, site in _sites(bank):
        found.setdefault(block, {})[name] = site.growth * _norms(params["layers"][block][name]["weight"], site)
    return found


def decomposed(params: Params, bank: Bank, magnitudes: Params) -> Bank:
    """The bank with growth m/‖W + s·B A‖ for its factors as they are now; differentiable in m.

    The norm is a constant to the gradient (Liu et al. 2024, DoRA §4.3), of the factors too, as in `lora.apply`; it is
    computed from ‖W‖², W Aᵀ and A Aᵀ, without ever making the product B A.
    """
    layers = dict(bank.layers)
    for block, name, site in _sites(bank):
        norms = jax.lax.stop_gradient(_norms(params["layers"][block][name]["weight"], site))
        growth = magnitudes[block][name].astype(norms.dtype) / norms
        layers[block] = layers[block] | {name: dataclasses.replace(site, growth=growth)}
    return dataclasses.replace(bank, layers=layers)


def _sites(bank: Bank) -> list[tuple[str, str, Site]]:
    if not bank.stacked:
        raise UserError("dora: got a bank of unrolled layers, expected stacked ones: train before you unstack")
    every = [(block, name, site) for block, sites in bank.layers.items() for name, site in sites.items()]
    found = [(block, name, site) for block, name, site in every if isinstance(site, Site) and site.growth is not None]
    if not found:
        raise UserError("dora: got a bank without magnitudes, expected room for them: BankSpec(magnitudes=True)")
    return found


def _norms(weight: Float[Array, "L F D"], site: Site) -> Float[Array, "L E F"]:
    """‖W + s·B A‖ over D."""
    wide = jnp.promote_types(weight.dtype, jnp.float32)
    product = lambda spec, *operands: jnp.einsum(spec, *operands, preferred_element_type=wide)
    b, scale = site.b.astype(wide), site.scale.astype(wide)[..., None]
    square = product("lfd,lfd->lf", weight, weight)[:, None]
    cross = product("lerf,lerf->lef", product("lfd,lerd->lerf", weight, site.a), b)
    own = product("lerf,lerf->lef", product("lers,lesf->lerf", product("lerd,lesd->lers", site.a, site.a), b), b)
    return jnp.sqrt(square + 2 * scale * cross + scale**2 * own)
