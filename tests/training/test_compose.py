"""The second stage from traces to a folder, over the testbed's small base and random experts."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.mixtures import lorahub
from molora_jax.checkpoints import composition, peft
from molora_jax.checkpoints import model as models
from molora_jax.config import UserError
from molora_jax.data.questions import questions
from molora_jax.evaluation import comparison, report, routing, systems
from molora_jax.serving import specialists
from molora_jax.training import classifier, compose
from molora_jax.training.compose import ComposeConfig
from molora_jax.training.mixture import MixtureConfig

MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NAMES = ("calc", "list")
OWNER = {name: name for name in NAMES}
CONFIG = ComposeConfig(mixture=MixtureConfig(rank=2), rows=2, steps=4, warmup=1, held_out=2, evaluate_every=4, seed=5)


@pytest.fixture(scope="module")
def world():
    model = models.load("testbed:small")
    how = dict(rank=2, sites=MLP, spread=0.05)
    experts = [fresh(model.cfg, model.params, name, seed=i, **how) for i, name in enumerate(NAMES)]
    traces = [e for name in NAMES for e in questions(f"testbed:{name}", "train", 12)]
    return model, experts, traces


@pytest.fixture(scope="module")
def composed(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("composed")
    return compose.run(*world, OWNER, CONFIG, folder, progress=False), folder


def test_the_router_and_the_shared_adapter_have_moved(world, composed):
    model, experts, _ = world
    found, _ = composed
    fresh_router = compose.mixture.new_mixer(model.cfg, model.params, CONFIG.mixture, experts, seed=5)
    for got, was in zip(jax.tree.leaves(found.mixer.params), jax.tree.leaves(fresh_router.params), strict=True):
        assert np.any(np.asarray(got) != np.asarray(was))
    assert any(np.any(update.b != 0) for _, _, update in found.attention.weights())
    assert found.experts == tuple(experts)
    assert compose.parameters(found)["router"] == model.cfg.width * 2


def test_the_folder_gives_the_same_composition(world, composed):
    model, experts, _ = world
    found, folder = composed
    back = composition.load(folder, model, experts)
    assert np.array_equal(back.mixer.params["out"]["weight"], found.mixer.params["out"]["weight"])
    assert set(back.attention.sites) == set(found.attention.sites)
    for path, column in found.attention.sites.items():
        for got, want in zip(back.attention.sites[path], column, strict=True):
            assert np.array_equal(got.a, want.a)
            assert np.array_equal(got.b, want.b)
    with pytest.raises(UserError, match="expected the order it was trained with"):
        composition.load(folder, model, experts[::-1])


def test_serving_loads_it_with_what_all_tokens_share(world, composed, tmp_path):
    model, experts, _ = world
    found, folder = composed
    for expert in experts:
        peft.save(tmp_path / expert.name, model.cfg, expert)
    items = [f"{expert.name}={tmp_path / expert.name}" for expert in experts]
    loaded = specialists.load(model, items, route="router", router=str(folder))
    assert "shared" in loaded.library.bank.at(0)
    asked = questions("testbed:calc", "test", 3)
    got = systems.answers(model, systems.composed("x", found), asked)
    bare = systems.answers(model, systems.composed("x", dataclasses.replace(found, attention=None)), asked)
    assert len(got) == len(bare) == 3
    short = systems.answers(model, systems.composed("x", found), asked, most=[2] * len(asked))
    for text, whole in zip(short, got, strict=True):
        assert len(model.tokenizer.encode(text, special=False)) <= 2
        assert whole.startswith(text)


@pytest.mark.slow
def test_a_run_goes_on_to_the_same_router(world, composed, tmp_path):
    part = dataclasses.replace(CONFIG, schedule="constant", evaluate_every=2)
    whole = compose.run(*world, OWNER, part, progress=False)
    compose.run(*world, OWNER, dataclasses.replace(part, steps=2), tmp_path, progress=False)
    resumed = compose.run(*world, OWNER, part, tmp_path, progress=False)
    want, got = (np.asarray(found.mixer.params["out"]["weight"]) for found in (whole, resumed))
    assert np.array_equal(got, want)


def test_lorahub_finds_one_weight_an_expert(world, tmp_path):
    pytest.importorskip("nevergrad", reason="needs nevergrad: pip install 'molora_jax[train]'")
    model, experts, traces = world
    config = dataclasses.replace(CONFIG, mixture=MixtureConfig(kind="lorahub"), steps=12)
    found = compose.run(*world, OWNER, config, tmp_path, progress=False)
    weights = np.asarray(found.mixer.params["weight"])
    assert weights.shape == (model.cfg.layers, 2)
    assert np.all(weights == weights[0])
    assert found.attention is None
    back = composition.load(tmp_path, model, experts)
    assert np.array_equal(back.mixer.params["weight"], weights)
    whole = lorahub.merged(experts, weights[0], name="hub")
    asked = traces[:2] + traces[-2:]
    alone = systems.System(name="merged", experts=(whole,), single="hub")
    assert systems.answers(model, systems.composed("x", back), asked) == systems.answers(model, alone, asked)


def test_too_few_traces_are_refused(world):
    model, experts, traces = world
    with pytest.raises(UserError, match="got traces of 12 questions of calc in 128 tokens"):
        compose.run(model, experts, traces, OWNER, dataclasses.replace(CONFIG, held_out=12), progress=False)


def test_traces_of_one_question_are_held_out_together_and_long_ones_are_counted(world, capsys):
    model, _, traces = world
    twice = [
        dataclasses.replace(t, id=f"{t.id}#{i}", completion=t.completion + " " * i) for t in traces for i in (0, 1)
    ]
    train, held = compose.split(model, twice, dataclasses.replace(CONFIG, held_out=3))
    question = lambda document: document.id.rpartition("#")[0]
    assert len(held) == 2 * 2 * 3
    assert not set(map(question, held)) & set(map(question, train))
    assert "longer" not in capsys.readouterr().out
    short = sorted(len(document) for document in (*train, *held))[len(twice) // 2]
    train, held = compose.split(model, twice, dataclasses.replace(CONFIG, held_out=1, length=short))
    left_out = len(twice) - len(train) - len(held)
    assert f"{left_out} of {len(twice)} traces are longer than the {short} of a row" in capsys.readouterr().out


def test_a_task_without_an_expert_is_refused(world):
    model, experts, traces = world
    with pytest.raises(UserError, match="got no expert of list, expected one of calc, list: .* --owner=list=EXPERT"):
        compose.run(model, experts, traces, {"calc": "calc"}, CONFIG, progress=False)


def test_a_composition_without_attention_leaves_none_behind(world, composed, tmp_path):
    model, experts, _ = world
    found, _ = composed
    composition.save(tmp_path, model, found)
    composition.save(tmp_path, model, dataclasses.replace(found, attention=None))
    assert composition.load(tmp_path, model, experts).attention is None


@pytest.mark.slow
def test_the_oracle_is_each_domains_own_expert_and_the_bounds_are_what_they_say(world):
    model, experts, _ = world
    sets = {name: questions(f"testbed:{name}", "test", 4, signs=0.0) for name in NAMES}
    bounds = systems.bounds(experts, OWNER, model.cfg.layers)
    assert [system.name for system in bounds] == ["base", "expert calc", "expert list", "uniform", "oracle"]
    some = systems.bounds(experts, OWNER, model.cfg.layers, ["oracle", "base"])
    assert [system.name for system in some] == ["base", "oracle"]
    assert systems.bounds((), {}, 2) == [systems.BASE]
    with pytest.raises(UserError, match="bounds: got 'best', expected some of base"):
        systems.bounds(experts, OWNER, 2, ["best"])
    written = {system.name: systems.answers(model, system, sets["calc"] + sets["list"]) for system in bounds}
    half = dataclasses.replace(bounds[-1], owner={"calc": "calc"})  # nobody owns the list: the base answers it
    assert systems.answers(model, half, sets["calc"][:1] + sets["list"][:1]) == [
        written["oracle"][0],
        written["base"][4],
    ]
    assert written["oracle"][:4] == written["expert calc"][:4]
    assert written["oracle"][4:] == written["expert list"][4:]
    found = comparison.compare(model, bounds[:1], sets)
    assert found.accuracy("base", "calc").n == 4
    want = [e.answer == _answer(text) for e, text in zip(sets["calc"], written["base"][:4], strict=True)]
    assert found.right["base"]["calc"].tolist() == want
    assert comparison.Comparison.of(found.values).values == found.values


def _answer(text):
    return text.split("\n")[0].split("->")[-1].strip() if "->" in text else None


def test_the_routing_of_a_forced_expert_is_all_its_own(world, composed):
    model, _, traces = world
    found, _ = composed
    bias = np.zeros((2, model.cfg.width), np.float32)
    params = {"out": {"weight": bias, "bias": np.array([0.0, 3.0], np.float32)}}
    forced = dataclasses.replace(found, mixer=dataclasses.replace(found.mixer, params=params))
    got = routing.routing(model, forced, traces[:3] + traces[-2:], rows=2)
    assert got.domains == ("calc", "list")
    assert np.allclose(got.confusion, [[0, 1], [0, 1]])
    sure = 1 / (1 + np.exp(-3.0))
    assert np.allclose(got.by_layer["top_mass"], sure, atol=1e-5)
    assert np.allclose(got.by_layer["margin"], 2 * sure - 1, atol=1e-5)
    assert got.mean("weight") == pytest.approx(1, abs=1e-6)
    assert got.mean("switch_rate") == 0


def test_an_evaluation_in_a_folder(world, composed, tmp_path):
    model, experts, _ = world
    found, _ = composed
    sets = {name: questions(f"testbed:{name}", "test", 3) for name in NAMES}
    right = {"x": {name: np.zeros(3, bool) for name in NAMES}}
    made = comparison.Comparison({name: tuple(e.id for e in own) for name, own in sets.items()}, right, {"x": 1.0})
    report.write(tmp_path, model, made, {"x": found}, sets, length=128, routed=1)
    values = json.loads((tmp_path / "evaluation.json").read_text())
    count = {e.name: sum(u.a.size + u.b.size for _, _, u in e.weights()) for e in experts}
    assert values["parameters"]["experts"] == count
    assert values["parameters"]["x"] == compose.parameters(found)
    assert values["routing"]["x"]["domains"] == list(NAMES)
    table = (tmp_path / "table.md").read_text()
    assert f"| expert calc | {count['calc']:,} |" in table
    assert f"| x: router | {2 * model.cfg.width:,} |" in table


def test_the_prompt_classifier_learns_the_domains(world):
    model, _, traces = world
    decides = classifier.train(model, traces, OWNER, list(NAMES), steps=40, rows=8)
    asked = [e for name in NAMES for e in questions(f"testbed:{name}", "test", 10)]
    prompts = [model.tokenizer.encode(example.prompt) for example in asked]
    got = systems.classified(model, decides, prompts)
    want = [NAMES.index(example.task) for example in asked]
    assert np.mean(np.equal(got, want)) >= 0.9
    with pytest.raises(UserError, match="got no expert of list"):
        classifier.train(model, traces, {"calc": "calc"}, list(NAMES))
