"""An adapter that every token has beside its expert, as the attention LoRA of a composition: its place in a bank."""

import dataclasses

import jax
import jax.numpy as jnp

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.bank import Bank
from molora_jax.adapters.spec import BankSpec, pack, unpack
from molora_jax.config import UserError
from molora_jax.typing import Params


def with_shared(bank: Bank, params: Params, adapter: Adapter) -> Bank:
    """The bank with an adapter that applies to every token: y + Δ_expert(x) + Δ_shared(x).

    In Molavi et al. 2026 (Hard-Routed MoR-LoRA) it is the attention LoRA that is trained together with the router. A
    token without an expert has it too, so that the base alone is what a bank without it gives.

    Raises:
      UserError: the bank has one, or the adapter is more than plain LoRA in the layers.
    """
    if "shared" in bank.at(0):
        raise UserError("shared: got a second adapter for every token, expected one: merge the two")
    spec = BankSpec.holding([adapter])
    if spec.gates or spec.biases or spec.magnitudes or spec.whole or set(spec.ranks) & {"embed", "head"}:
        raise UserError(
            f"shared: got adapter {adapter.name!r} with gates, biases, DoRA or changes of the embedding or the head, "
            "expected plain LoRA in the layers"
        )
    row = pack(spec, params, adapter)
    axis = 1 if bank.stacked else 0
    add = lambda leaf: jnp.expand_dims(jnp.asarray(leaf), axis)
    own = jax.tree.map(add, row.layers)
    if bank.stacked:
        return dataclasses.replace(bank, layers=bank.layers | {"shared": own})
    layers = [layer | {"shared": mine} for layer, mine in zip(bank.layers, own, strict=True)]
    return dataclasses.replace(bank, layers=layers)


def shared(bank: Bank, params: Params, like: Adapter) -> Adapter:
    """The adapter that `with_shared` put into the bank, with its values of now; `like` is the one that was put in."""
    layers = bank.layers["shared"] if bank.stacked else [layer["shared"] for layer in bank.layers]
    return unpack(Bank(layers), 0, params, like)


def without_shared(bank: Bank) -> Bank:
    """The bank with its experts alone."""
    bare = lambda layer: {block: sites for block, sites in layer.items() if block != "shared"}
    return dataclasses.replace(bank, layers=bare(bank.layers) if bank.stacked else [bare(v) for v in bank.layers])
