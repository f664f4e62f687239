"""Frozen experts and what composes them."""

import dataclasses
from typing import Any

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.router import Router, restricted
from molora_jax.config import UserError


@dataclasses.dataclass(frozen=True)
class Composition:
    """What stage 2 of Hard-Routed MoR-LoRA gives, or any other mixture of `training.mixture`.

    Attributes:
      experts: in the router's order.
      mixer: the router, its experts in the first slots of a bank of as many.
      attention: the adapter that all tokens have, or None.
    """

    experts: tuple[Adapter, ...]
    mixer: Any
    attention: Adapter | None = None


def without(found: Composition, name: str) -> Composition:
    """The composition less one expert: the router judges the others as before, and their tokens keep them.

    Raises:
      UserError: no such expert, no other one, or a router that is more than a scorer of each expert.
    """
    names = [expert.name for expert in found.experts]
    if name not in names or len(names) == 1:
        raise UserError(f"composition: got {name!r} to leave out of {', '.join(names)}, expected one of several")
    if type(found.mixer) is not Router:
        raise UserError(f"composition: got a {type(found.mixer).__name__}, expected a Router to leave an expert out of")
    kept = [i for i, own in enumerate(names) if own != name]
    experts = tuple(found.experts[i] for i in kept)
    return dataclasses.replace(found, experts=experts, mixer=restricted(found.mixer, kept))
