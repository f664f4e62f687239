"""Frozen experts and what composes them."""

import dataclasses
from typing import Any

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.library import Library
from molora_jax.typing import Params


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

    def library(self, params: Params) -> Library:
        """All of it in a bank for these parameters."""
        return Library.holding(self.experts, params, shared=self.attention)
