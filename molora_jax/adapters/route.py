"""Which expert each token uses: what was decided, and who decides."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from molora_jax.typing import Array, Bool, Float, Int

NONE = -1
"""The id of no adapter: the base alone."""
ROUTED = -2
"""The id of a token whose expert the router decides."""

LAYER = "layer"
"""Name of the decision that a layer takes once, for all its projections."""


_CHOICE = ["ids", "weights", "gate", "scores"]


@functools.partial(jax.tree_util.register_dataclass, data_fields=_CHOICE, meta_fields=["factored"])
@dataclasses.dataclass(frozen=True)
class Choice:
    """The experts of N tokens, for one decision; with a leading axis L, for the same decision in every layer.

    Attributes:
      ids: expert of each token, or `NONE`.
      weights: of a mixture of all experts; beside ids they are straight-through: their value does not count, their
        gradient does.
      gate: multiplies the update.
      factored: the mixture is of the factors, (Σ w_e s_e B_e)(Σ w_e A_e) x, not of the products Σ w_e s_e B_e A_e x.
      scores: what a router gave each of its J experts, for its losses and metrics; the experts do not look at them.
    """

    ids: Int[Array, "*L N"] | None = None
    weights: Float[Array, "*L N E"] | None = None
    gate: Float[Array, "*L N"] | None = None
    factored: bool = False
    scores: Float[Array, "*L N J"] | None = None

    def at(self, layer: Int[Array, ""] | int) -> "Choice":
        """The choice in one layer."""
        pick = lambda leaf, ndim: leaf[layer] if leaf is not None and leaf.ndim == ndim else leaf
        picked = dict(ids=pick(self.ids, 2), weights=pick(self.weights, 3), gate=pick(self.gate, 2))
        return Choice(**picked, scores=pick(self.scores, 3), factored=self.factored)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Route:
    """Where the choices come from: given beforehand, decided by a router, or both.

    Attributes:
      choices: given ones, by the decision's name: `LAYER`, or a site as "attn.q_proj" where it differs there. The
        trace of a run is such a table, and replays it. Ids of `ROUTED` are left to the router.
      router: decides the rest (see `adapters.router`). What is given keeps its value, and beside it the router's
        gradient is that of the given route; a gate that is not given is the router's.
      pool: the tokens that a decision for a whole row looks at; by default all valid ones.
    """

    choices: Mapping[str, Choice] = dataclasses.field(default_factory=dict)
    router: Any = None
    pool: Bool[Array, "N"] | None = None

    @classmethod
    def of(cls, ids: Int[Array, "N"]) -> "Route":
        """A given expert for each token, the same in every layer."""
        return cls({LAYER: Choice(ids=jnp.asarray(ids))})

    @classmethod
    def mixture(cls, weights: Float[Array, "*L N E"]) -> "Route":
        """Given weights of all experts for each token."""
        return cls({LAYER: Choice(weights=jnp.asarray(weights))})

    def at(self, layer: Int[Array, ""] | int) -> "Route":
        """The route in one layer."""
        choices = {name: choice.at(layer) for name, choice in self.choices.items()}
        return Route(choices, self.router and self.router.at(layer), self.pool)

    @property
    def ids(self) -> Int[Array, "N"] | None:
        """The given expert of each token, where it is the same in every layer."""
        choice = self.choices.get(LAYER)
        return None if choice is None or choice.ids is None or choice.ids.ndim != 1 else choice.ids


def vocabulary_ids(table: Int[Array, "V"], tokens: Int[Array, "N"]) -> Int[Array, "N"]:
    """The expert that each token's own id stands for (Shah & Wagle 2026, MoLoRA: vocabulary structure)."""
    return table[tokens]
