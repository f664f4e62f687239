"""A model of two matrices, to test what trains it: quick to compile, and easy to write down in numpy."""

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.data.batch import Batch
from molora_jax.training.batch import batch, next_tokens
from molora_jax.training.objective import Sums, token_scores

VOCAB, WIDTH = 11, 4


def tree(dtype=np.float32, seed: int = 0) -> dict:
    """Scores of the next token are head · (embed[token] + add[token])."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    return {
        "params": {"embed": {"weight": draw(VOCAB, WIDTH)}, "head": {"weight": draw(VOCAB, WIDTH)}},
        "adapter": {"add": draw(VOCAB, WIDTH) * 0, "slots": jnp.arange(3)},
    }


def loss(tree: dict, b: Batch, key: jax.Array) -> Sums:
    tokens = b.tokens.reshape(-1)
    hidden = tree["params"]["embed"]["weight"][tokens] + tree["adapter"]["add"][tokens]
    targets, weights = next_tokens(b)
    score, log_z, _ = token_scores(hidden, tree["params"]["head"]["weight"], targets, chunk=4)
    weights = weights.astype(score.dtype)
    return Sums(jnp.sum(weights * (log_z - score)), jnp.sum(weights))


def rows(seed: int = 0, count: int = 4, length: int = 6) -> Batch:
    """Rows whose tokens count differently, some not at all."""
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0, 2, (count, length)) * (rng.uniform(size=(count, length)) < 0.7)
    return batch(rng.integers(0, VOCAB, (count, length)), weights, ids=tuple(f"row {seed}.{i}" for i in range(count)))
