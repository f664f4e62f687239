"""An expert with its gates, without their memory, and with constant scales."""

import dataclasses

import jax
import numpy as np

from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.gate import GateConfig
from molora_jax.adapters.library import Library
from molora_jax.data.document import Document
from molora_jax.evaluation import gates, likelihood
from molora_jax.nn.layout import dense
from tests import fakes

NAME, SITES = "llama_untied", ("attn.q_proj", "mlp.down_proj")


def expert():
    """One whose scales depend on the token and on those before it."""
    made = fresh(
        *fakes.model(NAME), "gated", rank=2, sites=SITES, spread=0.5, gate=GateConfig(start="published", states=2)
    )
    loud = lambda core: core | {"out": core["out"] | {"weight": core["out"]["weight"] * 30}}
    groups = tuple(dataclasses.replace(group, cores=tuple(map(loud, group.cores))) for group in made.gates)
    return dataclasses.replace(made, gates=groups)


def test_scales_are_means_over_tokens_and_variants_differ_only_in_them():
    cfg, params = fakes.model(NAME)
    adapter, rng = expert(), np.random.default_rng(1)
    documents = [
        Document(str(n), rng.integers(0, 97, n), np.minimum(np.arange(n), 1).astype(np.float32)) for n in (5, 9)
    ]
    bank = Library.holding([adapter], params).bank
    constants = gates.means(cfg, params, bank, documents)
    alone = [gates.scales(cfg, params, bank, d.tokens, dense(1, len(d))) for d in documents]
    for site in SITES:
        own = np.concatenate([scales[site] for scales in alone], axis=1)  # [L N]
        assert own.std(axis=1).min() > 1e-3
        np.testing.assert_allclose(constants[site][:, 0], own.mean(axis=1), rtol=1e-5)
    losses = {
        name: likelihood.losses(cfg, params, documents, bank=variant)
        for name, variant in gates.variants(bank, constants).items()
    }
    assert list(losses) == ["gate", "reset", "mean", "one"]
    plain = Library.holding([dataclasses.replace(adapter, gate=None, gates=())], params).bank
    np.testing.assert_allclose(losses["one"], likelihood.losses(cfg, params, documents, bank=plain), rtol=1e-6)
    spread = np.stack([loss[1] for loss in losses.values()])
    assert np.diff(np.sort(spread)).min() > 1e-5
    first = jax.tree.map(lambda lam: lam[:, :1], alone[0])
    forgetful = gates.scales(cfg, params, gates.variants(bank, constants)["reset"], documents[0].tokens, dense(1, 5))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one[:, :1], other, rtol=1e-6), forgetful, first)
