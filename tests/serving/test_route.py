"""Routed generation from prompts to what is printed and written, on a tiny model and less of it."""

import dataclasses
import json

import numpy as np
import pytest

from molora_jax.config import UserError
from molora_jax.engine.request import Event, Request
from molora_jax.engine.routed import RoutedEngine
from molora_jax.engine.run import Fleet, Weights
from molora_jax.routing.program import SMALL
from molora_jax.routing.programs.deferral import Deferral
from molora_jax.routing.programs.single import Single
from molora_jax.serving import comparison, fleet, programs, route, threshold
from molora_jax.serving.programs import Options
from molora_jax.serving.prompts import Prompt
from tests import naive
from tests.serving import folders

PROMPTS = [Prompt("The quick brown fox"), Prompt("lazy dog"), Prompt("family")]
TEMPLATE = Request(prompt=(), max_new_tokens=20)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return fleet.load(folders.write(tmp_path_factory.mktemp("model")), [], ["1-1"], stacked=True)


@pytest.fixture(scope="module")
def asked(models) -> list[Request]:
    return route.ask(models, PROMPTS, TEMPLATE, programs.build("deferral-entropy", models, Options()))


@pytest.fixture(scope="module")
def engine(models, asked) -> RoutedEngine:
    return route.new_engine(models, programs.build("deferral-entropy", models, Options()), asked, rows=1, max_length=64)


@pytest.fixture(scope="module")
def middle(engine, asked) -> float:
    """A threshold on both sides of which there are tokens."""
    return float(np.median(engine.run(knob(asked[1:2], np.inf))[0].entropy))


def knob(requests, value: float) -> list[Request]:
    return [dataclasses.replace(each, knobs={"threshold": value}) for each in requests]


def test_prompts_become_requests(models, asked):
    assert [each.seed for each in asked] == [0, 1, 2]
    assert asked[1].prompt == models[1].tokenizer.encode("lazy dog")
    assert all(each.stops == models[1].tokenizer.eos for each in asked)


def test_one_answer_is_streamed_with_its_marks(models, engine, asked, middle, tmp_path, capsys):
    file = tmp_path / "a.jsonl"
    writers = route.generate(engine, models, PROMPTS[1:2], knob(asked[1:2], middle), output=str(file))
    out = capsys.readouterr().out.splitlines()
    (row,) = map(json.loads, file.read_text("utf-8").splitlines())
    assert row["writers"] == writers
    assert len(row["entropy"]) == len(row["tokens"]) == len(writers)
    assert {0, 1} == set(writers)
    assert row["text"] == models[1].tokenizer.decode(row["tokens"])
    assert row["prompt"] == "lazy dog"
    share = f"large (^) {sum(writers)} of {len(writers)} tokens ({sum(writers) / len(writers):.1%})"
    assert out[-1].endswith(share)
    assert any(set(line) == {"^", " "} or set(line) == {"^"} for line in out[:-1])


def test_several_answers_come_at_the_end(models, engine, asked, capsys):
    route.generate(engine, models, PROMPTS, knob(asked, np.inf), colour=True)
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line[:1] == "["] == ["[0]", "[1]", "[2]"]
    assert "\x1b[1;36mlarge\x1b[0m" in out


def test_a_trace_reads_back(models, engine, asked, middle, tmp_path):
    file = tmp_path / "a.jsonl"
    writers = route.generate(engine, models, PROMPTS[1:2], knob(asked[1:2], middle), output=str(file))
    assert route.read_trace(models, PROMPTS[1:2], str(file)) == [SMALL] * len(asked[1].prompt) + writers
    with pytest.raises(UserError, match="trace: got 3 prompts, expected one"):
        route.read_trace(models, PROMPTS, str(file))
    with pytest.raises(UserError, match="trace: cannot read writers from .*, expected what --output writes"):
        route.read_trace(models, PROMPTS[:1], str(tmp_path / "none"))


def test_a_router_scores_what_the_small_model_wrote(models, engine, asked):
    event = engine.run(knob(asked[:1], np.inf))[0]
    assert set(event.writers) == {SMALL}
    own = models[SMALL].cfg, models[SMALL].params
    scores = threshold.scores(engine.program, {}, *own, asked[0].prompt, event.tokens)
    np.testing.assert_allclose(scores, event.entropy, rtol=1e-4, atol=1e-5)


def test_a_share_becomes_a_threshold(engine, asked, capsys):
    requests = route.calibrated(engine, asked, asked, 0.3)
    value = requests[0].knobs["threshold"]
    assert f"threshold {value:.6g}: promises the large model" in capsys.readouterr().err
    entropy = np.concatenate([event.entropy for event in engine.run(knob(asked, np.inf))])
    assert abs(np.mean(entropy > value) - 0.3) <= 0.5 / len(entropy) + 1e-6


def test_low_scores_are_routed_where_the_program_says_so(models, asked):
    class Recorded:
        program, fleet = Deferral("margin"), Fleet(tuple(model.cfg for model in models), Deferral("margin"))
        weights = Weights(tuple(model.params for model in models), (None, None), {})

        def run(self, requests):
            assert all(each.knobs == {"threshold": -np.inf, "budget": 3} for each in requests)
            return [Event(i, [5, 6, 7, 8], None, "length") for i, _ in enumerate(requests)]

    given = [dataclasses.replace(each, knobs={"budget": 3}) for each in asked]
    chosen = threshold.choose(Recorded(), given, 0.5)
    own = models[SMALL].cfg, models[SMALL].params
    scores = [threshold.scores(Recorded.program, {}, *own, each.prompt, [5, 6, 7, 8]) for each in asked]
    routed = np.mean(np.concatenate(scores) < chosen.threshold)
    assert chosen.share == pytest.approx(3 * routed / (1 - routed + 3 * routed))
    assert 0.4 < chosen.share < 0.6


def test_a_share_needs_one_threshold(models, asked):
    lone = RoutedEngine.__new__(RoutedEngine)
    lone.program = Single(1)
    with pytest.raises(UserError, match="share: got 0.3 for Single, expected a program with one threshold"):
        threshold.choose(lone, asked, 0.3)


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_is_a_fraction(share, engine, asked):
    with pytest.raises(UserError, match=f"share: got {share}, expected 0 to 1"):
        threshold.choose(engine, asked, share)


def test_contenders_give_what_their_models_give(models, engine, asked, middle):
    found = comparison.contenders(models, engine, knob(asked, middle))
    assert list(found) == ["large only", "small only", "routed"]
    for name, model in (("large only", models[1]), ("small only", models[0])):
        each = found[name]
        each()
        events = each.engine.run(each.requests)
        assert [event.tokens for event in events] == [naive.generate(model.cfg, model.params, r)[0] for r in asked]
        assert each.tokens == sum(len(event.tokens) for event in events)
        assert each.engine.slots.hits == 0  # nothing of an earlier run was remembered
    for each in found.values():
        each.tokens = 60
    lines = comparison.table(found, {"large only": 2.0, "small only": 1.0, "routed": 4.0}).splitlines()
    assert [line.split() for line in lines] == [
        ["large", "only", "30.0", "tokens/s", "1.00", "×"],
        ["small", "only", "60.0", "tokens/s", "2.00", "×"],
        ["routed", "15.0", "tokens/s", "0.50", "×"],
    ]
