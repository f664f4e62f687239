"""A router and its attention LoRA that learn from rewards over frozen experts: what acted is what learns."""

import dataclasses

import jax
import numpy as np
import pytest

from molora_jax.adapters.composition import Composition
from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.route import LAYER, NONE, Route
from molora_jax.checkpoints import composition
from molora_jax.compilation import counted
from molora_jax.config import UserError
from molora_jax.models import transformer
from molora_jax.training import grpo, mixture, policy, sft
from molora_jax.training.actor import Actor
from molora_jax.training.batch import layout
from molora_jax.training.mixture import MixtureConfig
from tests.training import tiny
from tests.training.test_grpo import base, config, even  # noqa: F401 - fixtures

RATES = dict(rate=0.05, router_rate=0.5)


@pytest.fixture(scope="module")
def model(base):  # noqa: F811
    return sft.load(config(base))[0]


def composed(model, kind: str = "hard_dense", **how) -> Composition:
    """Two experts that change much, one of them all attention, under a router of random weights."""
    sites = (tiny.SITES, ("mlp.up_proj",))
    experts = tuple(
        fresh(model.cfg, model.params, f"e{i}", rank=4, sites=own, seed=i, spread=0.4) for i, own in enumerate(sites)
    )
    made = MixtureConfig(kind=kind, rank=2, spread=1.0, **how)
    mixer = mixture.new_mixer(model.cfg, model.params, made, experts, seed=3)
    return Composition(experts, mixer, mixture.new_attention(model.cfg, model.params, made, seed=3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hard", "hard_dense"])
def test_the_router_learns_and_the_experts_do_not(base, model, kind):  # noqa: F811
    start = composed(model, kind, per_layer=kind == "hard")
    made = grpo.Learner.of(config(base, temperature=0.5), model, policy.of_composition(model, start, **RATES))
    state, rewards = made.init(), []
    frozen = {path: np.array(leaf) for path, leaf in made.trainer.frozen.items()}
    for step in range(12):
        with counted() as count:
            drawn = made.collector.draw(state)
            state, metrics = made.step(state, drawn)
        assert step < 2 or not count.programs
        assert metrics["finite"]
        assert metrics["clip_share"] == 0
        assert drawn.facts["logprob_gap"] < 2e-4
        rewards.append(drawn.facts["reward"])
    for path, leaf in made.trainer.frozen.items():
        np.testing.assert_array_equal(leaf, frozen[path])
    now = made.trained(state)
    assert all(mine is theirs for mine, theirs in zip(now.experts, start.experts, strict=True))
    for one, two in zip(jax.tree.leaves(now.mixer.params), jax.tree.leaves(start.mixer.params), strict=True):
        assert np.abs(one - two).max() > 1e-3
    assert max(np.abs(w.b).max() for *_, w in now.attention.weights()) > 1e-3
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.05


def test_what_was_chosen_is_replayed(base, model):  # noqa: F811
    """The recorded experts are those of the router read afresh; forced ones give the scores of their own route."""
    start = composed(model)
    made = grpo.Learner.of(config(base), model, policy.of_composition(model, start, **RATES))
    batch = made.collector.draw(made.init()).experience
    rows, length, layers = batch.choices.shape
    assert layers == model.cfg.layers
    tree = made.trainer.computed(made.init())
    tokens, places = batch.tokens.reshape(-1), layout(batch)
    router = dataclasses.replace(start.mixer, **tree["router"])
    run = lambda route: transformer.apply(model.cfg, tree["params"], tokens, places, bank=tree["bank"], route=route)
    afresh = np.asarray(run(Route(router=router)).trace[LAYER].ids).T.reshape(rows, length, layers)
    read = batch.valid & np.pad(batch.valid[:, 1:], ((0, 0), (0, 1)))  # all but the last of a row
    assert set(np.unique(batch.choices[read])) == {0, 1}
    np.testing.assert_array_equal(batch.choices[read], afresh[read])
    assert (batch.choices[~read] == NONE).all()
    other = dataclasses.replace(batch, choices=np.where(batch.choices == NONE, NONE, 1 - batch.choices))
    decode = made.actor.policy.decode
    alone = run(Route.of(np.zeros(len(tokens), np.int32))).hidden
    forced = decode(tree, dataclasses.replace(batch, choices=np.zeros_like(batch.choices)))
    np.testing.assert_allclose(forced, alone, atol=1e-5)
    assert np.abs(np.asarray(decode(tree, other)) - np.asarray(decode(tree, batch))).max() > 0.1


@pytest.mark.slow
def test_a_refined_composition_is_written_and_resumed(base, model, tmp_path):  # noqa: F811
    start = composed(model)
    made = config(base, steps=2)
    result = grpo.refine(made, tmp_path / "x", model, start, progress=False)
    read = composition.load(result.out, model, start.experts)
    gap = lambda one, two: max(
        np.abs(a - b).max() for a, b in zip(*(jax.tree.leaves(c.mixer.params) for c in (one, two)), strict=True)
    )
    assert gap(read, start) > 0
    longer = grpo.refine(dataclasses.replace(made, steps=3), tmp_path / "x", model, start, progress=False)
    at_once = grpo.refine(dataclasses.replace(made, steps=3), tmp_path / "y", model, start, progress=False)
    assert gap(*(composition.load(one.out, model, start.experts) for one in (longer, at_once))) == 0
    other = dataclasses.replace(start, experts=tuple(reversed(start.experts)))
    with pytest.raises(UserError, match="got experts="):
        grpo.refine(made, tmp_path / "x", model, other, progress=False)


def test_routers_that_no_trace_tells_whole_are_refused(model):
    for kind in ("top2", "soft", "xlora"):
        with pytest.raises(UserError, match="expected a router of one expert a layer"):
            policy.of_composition(model, composed(model, kind), **RATES)


def test_a_policy_of_one_adapter_records_nothing(model):
    own = fresh(model.cfg, model.params, "x", rank=4, sites=tiny.SITES)
    made = policy.of_adapter(model, own, rate=1e-3)
    assert not made.routed
    assert made.choices([]) is None
    assert Actor(model.cfg, model.tokenizer, made, rows=2, length=16, most=4).engine.config.trace is False
