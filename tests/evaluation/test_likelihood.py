"""Documents' losses against logits of each one alone."""

import jax
import numpy as np
import pytest

from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.library import Library
from molora_jax.adapters.route import Route
from molora_jax.config import UserError
from molora_jax.data.document import Document
from molora_jax.evaluation import likelihood
from molora_jax.models import transformer
from molora_jax.nn.layout import dense
from tests import fakes

NAME = "llama_untied"
SIZES = (2, 33, 7, 1 + 31, 5)  # two of them in the last batch, beside a row without tokens


def documents():
    rng = np.random.default_rng(0)
    for i, size in enumerate(SIZES):
        weights = rng.uniform(0.1, 2, size).astype(np.float32) * (rng.uniform(size=size) < 0.7)
        weights[0], weights[1] = 0, 1
        yield Document(f"document {i}", rng.integers(0, 97, size), weights)


@pytest.mark.parametrize("expert", [None, 0, 1])
def test_each_is_the_weighted_mean_over_its_own_tokens(expert):
    cfg, params = fakes.model(NAME)
    adapters = [fresh(cfg, params, name, rank=2, seed=seed, spread=0.3) for seed, name in enumerate("ab")]
    bank = None if expert is None else Library.holding(adapters, params).bank
    found = likelihood.losses(cfg, params, list(documents()), bank=bank, expert=expert or 0, rows=3)

    @jax.jit
    def alone(tokens):
        how = {} if bank is None else dict(bank=bank, route=Route.of(np.full(len(tokens), expert, np.int32)))
        hidden = transformer.apply(cfg, params, tokens, dense(1, len(tokens)), **how).hidden
        return jax.nn.log_softmax(transformer.logits(cfg, params, hidden))

    for document, loss in zip(documents(), found, strict=True):
        log_p = alone(document.tokens)
        own = -np.asarray(log_p)[np.arange(len(document) - 1), document.tokens[1:]]
        np.testing.assert_allclose(loss, np.average(own, weights=document.weights[1:]), rtol=1e-5)


def test_documents_without_anything_to_predict_are_named():
    cfg, params = fakes.model(NAME)
    empty = Document("silent", np.arange(3), np.zeros(3, np.float32))
    with pytest.raises(UserError, match="silent"):
        likelihood.losses(cfg, params, [*documents(), empty])
    with pytest.raises(UserError, match="no documents"):
        likelihood.losses(cfg, params, [])
