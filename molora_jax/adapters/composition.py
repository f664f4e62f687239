"""Frozen experts and what composes them."""

import dataclasses
from typing import Any

from molora_jax.adapters.adapter import Adapter


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
