"""How probable a model finds each of some documents."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters.bank import Bank
from molora_jax.adapters.route import Route
from molora_jax.config import ModelConfig, UserError
from molora_jax.data.batch import Batch
from molora_jax.data.document import Document
from molora_jax.data.packing import assemble
from molora_jax.models import transformer
from molora_jax.training.batch import layout, next_tokens
from molora_jax.training.objective import head, token_scores
from molora_jax.typing import Array, Float, Params


def losses(
    cfg: ModelConfig,
    params: Params,
    documents: Sequence[Document],
    *,
    bank: Bank | None = None,
    expert: int = 0,
    rows: int = 8,
) -> Float[np.ndarray, "n"]:
    """Mean of -log p of each document's tokens, by their weights, in nats.

    All batches have one shape: the longest document's length, in steps of 32 tokens.

    Args:
      bank: experts, of which `expert` is the slot that all tokens use.
      rows: documents that run at once.

    Raises:
      UserError: no document, or one without a token that counts.
    """
    if not documents:
        raise UserError("evaluation: got no documents, expected at least one")
    if empty := [document.id for document in documents if not np.any(document.weights[1:])]:
        raise UserError(f"evaluation: got {empty[0]} without a token that counts, expected some in every document")
    length = -(-max(map(len, documents)) // 32) * 32
    found = []
    for start in range(0, len(documents), rows):
        chosen = documents[start : start + rows]
        batch = assemble([*([document] for document in chosen), *[[]] * (rows - len(chosen))], length)
        found.append(np.asarray(_losses(cfg, params, bank, expert, batch))[: len(chosen)])
    return np.concatenate(found)


@functools.partial(jax.jit, static_argnums=0)
def _losses(cfg: ModelConfig, params: Params, bank: Bank | None, expert, batch: Batch) -> Float[Array, "B"]:
    tokens = batch.tokens.reshape(-1)
    how = {} if bank is None else dict(bank=bank, route=Route.of(jnp.full(tokens.shape, expert, jnp.int32)))
    hidden = transformer.apply(cfg, params, tokens, layout(batch), **how).hidden
    targets, weights = next_tokens(batch)
    score, log_z, _ = token_scores(hidden, head(cfg, params, bank), targets)
    by_row = lambda values: jnp.sum(values.reshape(batch.tokens.shape), axis=1)
    weight = by_row(weights)
    return by_row(weights * (log_z - score)) / jnp.where(weight > 0, weight, 1)
