"""The prompt classifier: one expert for a whole prompt, from the mean embedding of its tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from molora_jax.adapters.router import Scorer, score
from molora_jax.adapters.selection import Placement
from molora_jax.typing import Array, Bool, Float, Int, Params


@functools.partial(jax.tree_util.register_dataclass, data_fields=["params", "placement"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class PromptClassifier:
    """argmax of W·(mean embedding) + b, or of a two-layer scorer: the baseline of per-token routers.

    Its scores train by cross-entropy against each prompt's domain; `ids` are then given for all tokens of a row.
    """

    params: Params
    placement: Placement

    def scores(
        self, embed: Float[Array, "V D"], tokens: Int[Array, "B T"], valid: Bool[Array, "B T"]
    ) -> Float[Array, "B J"]:
        """Of the experts, for each prompt."""
        wide = jnp.promote_types(embed.dtype, jnp.float32)
        x = jnp.where(valid[..., None], embed[tokens].astype(wide), 0)
        return score(self.params, jnp.sum(x, axis=1) / jnp.maximum(jnp.sum(valid, axis=1, keepdims=True), 1))

    def ids(self, embed: Float[Array, "V D"], tokens: Int[Array, "B T"], valid: Bool[Array, "B T"]) -> Int[Array, "B"]:
        """The slot of each prompt's expert."""
        return self.placement.slots[jnp.argmax(self.scores(embed, tokens, valid), axis=-1)]


def classifier(width: int, experts: int, *, hidden: int = 0, seed: int = 0) -> PromptClassifier:
    """A random one, to train."""
    scorer = Scorer(width, experts, hidden=hidden, bias=True, rngs=nnx.Rngs(seed), dtype=jnp.float32)
    placement = Placement(jnp.arange(experts, dtype=jnp.int32), experts)
    return PromptClassifier(nnx.to_pure_dict(nnx.state(scorer, nnx.Param)), placement)
