"""Mixtures that become one adapter, decide for a prompt, or need two passes: LoraHub, soups, classifier, X-LoRA."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters.adapter import LoRAWeights, merge
from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.gate import GateConfig
from molora_jax.adapters.mixtures import lorahub
from molora_jax.adapters.mixtures.arrow import arrow, prototype
from molora_jax.adapters.mixtures.classifier import classifier
from molora_jax.adapters.mixtures.phatgoose import phatgoose
from molora_jax.adapters.mixtures.soups import concatenated, soup
from molora_jax.adapters.mixtures.xlora import xlora
from molora_jax.adapters.route import Route
from molora_jax.adapters.selection import Placement
from molora_jax.config import UserError
from molora_jax.models import transformer
from molora_jax.models.state import new_state
from molora_jax.nn.layout import dense, ragged
from tests.adapters.numpy_decoder import decode
from tests.adapters.routing import SHAPE, identical, run, tokens, world
from tests.numerics import assert_close

N = SHAPE[0] * SHAPE[1]
WEIGHTS = np.array([0.7, -1.2, 0.4])


def alone(cfg, params, adapter, rows):
    cfg, params = merge(cfg, params, adapter)
    return transformer.apply(cfg, params, rows.reshape(-1), dense(*rows.shape)).hidden


def test_lorahub_sums_factors_in_one_adapter_and_in_the_bank():
    cfg, params, adapters, library = world()
    rows = tokens(cfg)
    want = decode(cfg, params, adapters, rows, lambda at: np.tile(WEIGHTS, (N, 1)), factored=True)
    assert_close(alone(cfg, params, lorahub.merged(adapters, WEIGHTS, name="hub"), rows), want, "model")
    slots = np.zeros(5, np.float32)
    slots[:3] = WEIGHTS
    assert_close(run(cfg, params, rows, library.bank, lorahub.mixture(slots, N)).hidden, want, "model")


def test_lorahub_finds_weights():
    pytest.importorskip("nevergrad", reason="needs nevergrad: pip install 'molora_jax[train]'")
    seen = []

    def loss(w):
        seen.append(np.array(w))
        return float(((w - [1.0, 0, -3]) ** 2).sum())

    found = lorahub.search(loss, 3, steps=150, seed=1)
    assert len(seen) == 150
    identical(seen[0], np.zeros(3))
    assert np.abs(seen).max() <= 1.5
    # (w-a)² + 0.05|w| is least where a moved 0.025 towards zero, within the bound
    score = lambda w: ((w - [1.0, 0, -3]) ** 2).sum() + 0.05 * np.abs(w).sum()
    assert score(found) < score(np.array([0.975, 0, -1.5])) + 0.03
    identical(lorahub.search(loss, 3, steps=150, seed=1), found)


def test_lorahub_refuses_what_is_no_sum_of_factors():
    cfg, params, adapters, _ = world()
    with pytest.raises(UserError, match="got 3 adapters and 2 weights"):
        lorahub.merged(adapters, [1, 2], name="hub")
    path = ("layers", "mlp", "up_proj")
    biased = tuple(dataclasses.replace(w, bias=np.zeros(len(w.b))) for w in adapters[0].sites[path])
    bad = dataclasses.replace(adapters[0], sites={path: biased})
    with pytest.raises(UserError, match="'e0' with DoRA, biases or whole weights"):
        lorahub.merged([bad, adapters[1]], [1, 2], name="hub")
    gated = fresh(cfg, params, "gated", rank=2, sites=("mlp.up_proj",), gate=GateConfig())
    with pytest.raises(UserError, match="gated"):
        lorahub.merged([gated, adapters[1]], [1, 2], name="hub")


def test_a_soup_is_one_adapter():
    cfg, params, adapters, library = world()
    rows, weights = tokens(cfg), np.random.default_rng(0).standard_normal((cfg.layers, 3))
    want = decode(cfg, params, adapters, rows, lambda at: np.tile(weights[at.layer], (N, 1)))
    made = concatenated(adapters, weights, name="soup")
    assert_close(alone(cfg, params, made, rows), want, "model")
    assert {w.rank for w in made.sites["layers", "mlp", "up_proj"]} == {3 + 1}
    router = dataclasses.replace(soup(3, cfg.layers), params={"weight": jnp.asarray(weights, jnp.float32)})
    out = run(cfg, params, rows, library.bank, Route({}, router.placed((0, 1, 2), 5)))
    assert_close(out.hidden, want, "model")
    identical(run(cfg, params, rows, library.bank, Route(out.trace, router.placed((0, 1, 2), 5))).hidden, out.hidden)
    with pytest.raises(UserError, match=r"expected \[L, 3\]"):
        concatenated(adapters, weights[:, :2], name="soup")
    with pytest.raises(UserError, match="2 layers in 'e0', expected a projection of 1 layers"):
        concatenated(adapters, weights[:1], name="soup")


def test_the_prompt_classifier_reads_the_mean_embedding():
    cfg, params, _, library = world()
    rows, valid = tokens(cfg, shape=(4, 6)), np.arange(6) < np.array([6, 1, 3, 5])[:, None]
    embed = params["embed"]["weight"]
    made = classifier(cfg.width, 3, seed=2)
    made = dataclasses.replace(made, placement=Placement(jnp.array([4, 0, 2]), 5))
    weight, bias = (np.asarray(made.params["out"][k], np.float64) for k in ("weight", "bias"))
    means = [np.asarray(embed, np.float64)[row[v]].mean(0) for row, v in zip(rows, valid, strict=True)]
    want = np.stack(means) @ weight.T + bias
    assert_close(made.scores(embed, rows, valid), want)
    identical(made.ids(embed, rows, valid), np.array([4, 0, 2])[want.argmax(-1)])
    assert len(set(want.argmax(-1))) > 1


def test_xlora_decodes_with_a_cache():
    cfg, params, _, library = world()
    rows = tokens(cfg)
    made = dataclasses.replace(xlora(cfg.width, 3, cfg.layers, k=2), placement=Placement(jnp.arange(3), 5))
    layout = dense(*SHAPE)
    base = transformer.apply(cfg, params, rows.reshape(-1), layout).hidden
    want = run(cfg, params, rows, library.bank, made.route(base)).hidden.reshape(*SHAPE, -1)

    @jax.jit
    def both(flat, layout, first, second):
        base = transformer.apply(cfg, params, flat, layout, first)
        out = transformer.apply(cfg, params, flat, layout, second, bank=library.bank, route=made.route(base.hidden))
        return out.hidden, base.state, out.state

    first, second = (new_state(cfg, pages=(4,), page_size=4) for _ in range(2))
    tables = np.arange(4).reshape(1, 2, 2).astype(np.int32)
    got = []
    for start, stop in ((0, 4), (4, 5), (5, 6), (6, 7)):
        length = stop - start
        parts = ragged(np.full(2, start), np.full(2, length), tables, tokens=8, tile=2, page_size=4)
        flat = np.resize(rows[:, start:stop].reshape(-1), 8)
        hidden, first, second = both(flat, parts, first, second)
        got.append(np.asarray(hidden[: 2 * length]).reshape(2, length, -1))
    assert_close(np.concatenate(got, axis=1), want, "model")


def test_a_prototype_is_what_the_update_responds_to_most():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((3, 7)), rng.standard_normal((5, 3))
    got = prototype(LoRAWeights(a=a.astype(np.float32), b=b.astype(np.float32), alpha=1))
    want = np.linalg.svd(b @ a)[2][0]
    np.testing.assert_allclose(np.abs(got @ want), 1, rtol=1e-6)
    assert not prototype(LoRAWeights(a=a, b=0 * b, alpha=1)).any()
    with pytest.raises(UserError, match="got k=4 of 3 experts"):
        arrow(world()[2], k=4)


def test_phatgoose_trains_the_gate_of_a_given_expert():
    cfg, params, _, library = world()
    router = phatgoose({"mlp.up_proj": cfg.width}, 3, cfg.layers, training=True).placed((0, 1, 2), 5)
    with pytest.raises(UserError, match="expected the expert whose gate trains"):
        router.at(0).decide("mlp.up_proj", jnp.zeros((cfg.width, N)), None, None, dense(*SHAPE))
