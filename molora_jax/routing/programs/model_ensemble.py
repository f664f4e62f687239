"""Model ensemble by weights (ME; TokenRouter, arXiv 2610.12242, §5): the next writer is drawn anew for each token."""

import dataclasses

import jax
import jax.numpy as jnp

from molora_jax.routing.program import Program, decide


@dataclasses.dataclass(frozen=True)
class ModelEnsemble(Program):
    """Model i writes a token with probability `w{i}` over the sum of the weights.

    Each token has exactly the distribution Σ w_i p_i, at the cost of one model's run instead of M.
    """

    models: int = 3

    signals = frozenset({"position"})

    @property
    def knobs(self):
        return dict(zip([f"w{i}" for i in range(self.models)], [0.5, 0.3, 0.2] + [0.0] * self.models, strict=False))

    def init(self, params, knobs, key):
        return jax.random.bits(key)

    def start(self, params, knobs, state):
        return state, decide(self._draw(knobs, state, 0))

    def step(self, params, knobs, state, model, sig):
        return state, decide(self._draw(knobs, state, sig.position + 1))

    def _draw(self, knobs, seed, position):
        key = jax.random.fold_in(jax.random.key(seed), position)
        weights = jnp.stack([knobs[f"w{i}"] for i in range(self.models)])
        sums = jnp.cumsum(weights)
        return jnp.sum(jax.random.uniform(key) * sums[-1] >= sums[:-1])
