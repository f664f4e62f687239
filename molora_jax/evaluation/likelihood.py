"""How probable a model finds each of some documents."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

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
from molora_jax.training import mixture
from molora_jax.training.batch import layout, next_tokens
from molora_jax.training.objective import head, token_scores
from molora_jax.typing import Bool, Float, Params


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """Of some documents.

    Attributes:
      log_p: Σ w log p over each document's tokens, in nats.
      weight: Σ w.
      greedy: whether every token that counts is the most probable one.
    """

    log_p: Float[np.ndarray, "n"]
    weight: Float[np.ndarray, "n"]
    greedy: Bool[np.ndarray, "n"]


def losses(cfg: ModelConfig, params: Params, documents: Sequence[Document], **how) -> Float[np.ndarray, "n"]:
    """Mean of -log p of each document's tokens, by their weights, in nats; `how` is for `likelihood`."""
    found = likelihood(cfg, params, documents, **how)
    return -found.log_p / found.weight


def likelihood(
    cfg: ModelConfig,
    params: Params,
    documents: Sequence[Document],
    *,
    bank: Bank | None = None,
    expert: int = 0,
    mixer: Any = None,
    rows: int = 8,
) -> Likelihood:
    """How probable the documents are. All batches have one shape: the longest one's length, in steps of 32 tokens.

    Args:
      bank: experts, of which `expert` is the slot that all tokens use.
      mixer: a router that decides instead.
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
        values = _likelihood(cfg, params, bank, expert, mixer, batch)
        found.append([np.asarray(value)[: len(chosen)] for value in values])
    return Likelihood(*map(np.concatenate, zip(*found, strict=True)))


@functools.partial(jax.jit, static_argnums=0)
def _likelihood(cfg: ModelConfig, params: Params, bank: Bank | None, expert, mixer, batch: Batch):
    """(Σ w log p, Σ w, all greedy), by row."""
    tokens = batch.tokens.reshape(-1)
    if mixer is not None:
        hidden = mixture.forward(cfg, {"params": params, "bank": bank}, batch, mixer).hidden
    else:
        how = {} if bank is None else dict(bank=bank, route=Route.of(jnp.full(tokens.shape, expert, jnp.int32)))
        hidden = transformer.apply(cfg, params, tokens, layout(batch), **how).hidden
    targets, weights = next_tokens(batch)
    score, log_z, highest = token_scores(hidden, head(cfg, params, bank), targets)
    by_row = lambda values: values.reshape(batch.tokens.shape)
    greedy = jnp.all(by_row((score >= highest) | (weights == 0)), axis=1)
    return jnp.sum(by_row(weights * (score - log_z)), axis=1), jnp.sum(by_row(weights), axis=1), greedy
