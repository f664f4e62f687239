"""What the gates of a bank are good for: the same experts with constant scales, or with scales without a memory."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp

from molora_jax.adapters.bank import APART, Bank, Layer
from molora_jax.config import UserError
from molora_jax.typing import Array, Bool, Float


def without_memory(bank: Bank) -> Bank:
    """The bank whose gates read every token as if it were the first of its text.

    Raises:
      UserError: it has no gates.
    """
    _need_gates(bank)
    return dataclasses.replace(bank, gates=dataclasses.replace(bank.gates, ablation="reset"))


def means(
    scales: Mapping[str, Float[Array, "L N E *R"]], counts: Bool[Array, "N"]
) -> dict[str, Float[Array, "L E *R"]]:
    """The mean λ over the tokens that count, by site, of what `transformer.apply` gives as the tap "gates"."""
    return {site: jnp.einsum("ln...,n->l...", lam, counts / jnp.sum(counts)) for site, lam in scales.items()}


def frozen(bank: Bank, constants: Mapping[str, Float[Array, "L E *R"]]) -> Bank:
    """The bank without gates whose updates are scaled by constants instead: plain LoRA, B_e diag(λ_e) A_e.

    Its factors need no second look at the tokens, so that generation token by token is the same expert as scoring.

    Args:
      constants: by site, as `means` finds them.

    Raises:
      UserError: it has no gates, or the constants are of other sites.
    """
    _need_gates(bank)
    gated = {site for group in bank.gates.groups for site in group}
    if gated != set(constants):
        raise UserError(f"ablation: got constants for {sorted(constants)}, expected {sorted(gated)}, the gated sites")
    if bank.stacked:
        layers = _frozen(bank.layers, constants)
    else:
        at = lambda i: {site: values[i] for site, values in constants.items()}
        layers = [_frozen(layer, at(i)) for i, layer in enumerate(bank.layers)]
    return dataclasses.replace(bank, layers=layers, gates=None)


def _frozen(layer: Layer, constants: Mapping[str, Array]) -> Layer:
    """The sites of one layer, or of all where they are stacked."""

    def scaled(key: str, site):
        if key not in constants:
            return site
        lam = constants[key]
        if lam.ndim == site.scale.ndim:
            lam = lam[..., None]
        else:  # plain experts beside the gated ones may have a higher rank
            room = site.b.shape[-2] - lam.shape[-1]
            lam = jnp.pad(lam, [(0, 0)] * (lam.ndim - 1) + [(0, room)], constant_values=1)
        return dataclasses.replace(site, b=(site.b * lam[..., None]).astype(site.b.dtype))

    blocks = {
        block: {leaf: scaled(f"{block}.{leaf}", site) for leaf, site in sites.items()}
        for block, sites in layer.items()
        if block not in APART
    }
    return blocks | {key: layer[key] for key in layer if key == "shared"}


def _need_gates(bank: Bank) -> None:
    if bank.gates is None:
        raise UserError("ablation: got a bank without gates, expected one with gated experts")
