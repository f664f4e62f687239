"""Experts that come and go: what a trained router knows of the others stays as it is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters.composition import Composition, without
from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.mixtures.soups import soup
from molora_jax.adapters.router import new_router, restricted
from molora_jax.checkpoints import composition
from molora_jax.checkpoints import model as models
from molora_jax.config import UserError
from molora_jax.data.questions import questions
from molora_jax.training import growth, mixture
from molora_jax.training.batch import batch
from molora_jax.training.compose import ComposeConfig
from molora_jax.training.mixture import MixtureConfig
from tests.numerics import assert_close

MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NAMES = ("calc", "logic", "list")


@pytest.fixture(scope="module")
def world():
    model = models.load("testbed:small")
    how = dict(rank=2, sites=MLP, spread=0.3)
    experts = [fresh(model.cfg, model.params, name, seed=i, **how) for i, name in enumerate(NAMES)]
    attention = fresh(model.cfg, model.params, "attention", rank=2, sites=("attn.q_proj",), seed=9, spread=0.3)
    return model, experts, attention


@pytest.mark.parametrize("how", [dict(), dict(hidden=4, bias=True), dict(layers=2, bias=True)])
def test_a_restricted_router_scores_the_others_as_before(how):
    router = new_router(6, 4, **how)
    shaken = jax.tree.map(lambda leaf: leaf + jnp.linspace(0, 1, leaf.size).reshape(leaf.shape), router.params)
    router = dataclasses.replace(router, params=shaken)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 6)), jnp.float32)
    few = restricted(router, (3, 0))
    at = (lambda r: r.at(1)) if "layers" in how else (lambda r: r)
    assert_close(at(few).scores(x), np.asarray(at(router).scores(x))[:, [3, 0]])
    assert few.placement.slots.tolist() == [0, 1]
    assert few.placement.size == 2


def test_without_an_expert_its_tokens_alone_get_another_one(world):
    model, experts, attention = world
    found = Composition(tuple(experts), new_router(model.cfg.width, 3, seed=2), attention)
    rows = batch(np.random.default_rng(1).integers(0, model.cfg.vocab, (3, 40)))
    run = lambda c: mixture.forward(model.cfg, _tree(model, c), rows, c.mixer).trace["layer"].ids[0]
    whole, less = np.asarray(run(found)), np.asarray(run(without(found, "logic")))
    names = np.array(NAMES)[whole]
    assert set(names) == set(NAMES)
    kept = names != "logic"
    assert np.array_equal(np.array(["calc", "list"])[less][kept], names[kept])
    assert without(found, "logic").experts == (experts[0], experts[2])
    assert without(found, "logic").attention is attention
    with pytest.raises(UserError, match="got 'text' to leave out of calc, logic, list"):
        without(found, "text")
    with pytest.raises(UserError, match="got a Soup, expected a Router"):
        without(dataclasses.replace(found, mixer=soup(3, model.cfg.layers)), "calc")


def _tree(model, found):
    return mixture.tree(model.params, found.experts, found.mixer, found.attention)


@pytest.mark.parametrize("how", [dict(), pytest.param(dict(hidden=4, bias=True), marks=pytest.mark.slow)])
def test_an_expert_more_trains_its_own_scores_alone(world, tmp_path, how):
    model, experts, attention = world
    old = Composition(tuple(experts[:2]), new_router(model.cfg.width, 2, seed=2, **how), attention)
    before = jax.tree.map(np.array, old.mixer.params)
    traces = [e for name in NAMES for e in questions(f"testbed:{name}", "train", 10)]
    shape = dict(rows=2, steps=3, warmup=1, held_out=2, evaluate_every=3)
    config = ComposeConfig(mixture=MixtureConfig(kind="hard_dense"), **shape)
    owner = dict(zip(NAMES, NAMES, strict=True))
    found = growth.grown(model, old, experts[2], traces, owner, config, tmp_path, progress=False)
    assert [e.name for e in found.experts] == list(NAMES)
    assert found.attention is attention
    for got, was in zip(jax.tree.leaves(found.mixer.params["out"]), jax.tree.leaves(before["out"]), strict=True):
        was = was[..., None] if was.ndim == 1 else was
        got = got[..., None] if got.ndim == 1 else got
        assert np.array_equal(got[:2], was)
        assert np.any(got[2] != was.mean(axis=0))
    if "hidden" in how:
        jax.tree.map(np.testing.assert_array_equal, found.mixer.params["hidden"], before["hidden"])
    back = composition.load(tmp_path, model, experts)
    jax.tree.map(np.testing.assert_array_equal, back.mixer.params, found.mixer.params)


def test_a_router_that_is_more_than_scores_does_not_grow(world):
    model, experts, _ = world
    found = Composition(tuple(experts[:2]), soup(2, model.cfg.layers))
    with pytest.raises(UserError, match="growth: got a Soup, expected a Router"):
        growth.grown(model, found, experts[2], [], {}, ComposeConfig())
