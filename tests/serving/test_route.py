"""Routed generation from prompts to what is printed and written, on a tiny model and less of it."""

import dataclasses
import itertools
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
    def share(requests) -> float:
        return float(np.mean(np.concatenate([event.writers for event in engine.run(requests)])))

    requests = route.calibrated(engine, asked, asked, 0.3)
    value, realised = requests[0].knobs["threshold"], share(requests)
    told = f"threshold {value:.6g}: with it the large model wrote {realised:.1%} of 3 answers"
    assert told in capsys.readouterr().err
    own = np.concatenate([event.entropy for event in engine.run(knob(asked, np.inf))])
    others = [share(knob(asked, float(np.quantile(own, q)))) for q in (0.2, 0.5, 0.7, 0.9)]
    assert abs(realised - 0.3) <= min(abs(other - 0.3) for other in others) + threshold.CLOSE
    assert abs(realised - 0.3) < 0.1


class Recorded:
    """An engine of a program that routes low scores: all tokens under the threshold become the large model's."""

    program = Deferral("margin")
    TOKENS = (5, 6, 7, 8, 9, 10)

    def __init__(self, models):
        self.fleet = Fleet(tuple(model.cfg for model in models), self.program)
        self.weights = Weights(tuple(model.params for model in models), (None, None), {})
        self.thresholds = []

    def scores(self, request) -> np.ndarray:
        own = self.fleet.cfgs[SMALL], self.weights.models[SMALL]
        return threshold.scores(self.program, {}, *own, request.prompt, self.TOKENS)

    def run(self, requests):
        self.thresholds.append(requests[0].knobs["threshold"])
        writers = [(self.scores(each) < self.thresholds[-1]).astype(int).tolist() for each in requests]
        return [Event(i, list(self.TOKENS), None, "length", writers=each) for i, each in enumerate(writers)]


def test_low_scores_are_routed_where_the_program_says_so(models, asked):
    engine = Recorded(models)
    chosen = threshold.choose(engine, asked, 0.5)
    assert engine.thresholds == [-np.inf, chosen.threshold]  # a text that does not change needs one round
    assert chosen.share == 0.5
    scores = np.concatenate([engine.scores(each) for each in asked])
    assert np.sum(scores < chosen.threshold) == len(scores) / 2


class Astray(Recorded):
    """Its share jumps with the threshold, whatever the scores are."""

    def run(self, requests):
        self.thresholds.append(value := requests[0].knobs["threshold"])
        share = 0 if value < 0.3 else 0.8 if value < 0.5 else 1
        writers = [int(i < share * len(self.TOKENS)) for i in range(len(self.TOKENS))]
        return [Event(i, list(self.TOKENS), None, "length", writers=writers) for i, _ in enumerate(requests)]


def test_where_no_threshold_gives_the_share_the_nearest_counts(models, asked):
    engine = Astray(models)
    chosen = threshold.choose(engine, asked, 0.6)
    tried = engine.thresholds[1:]
    assert len(tried) <= threshold.ROUNDS
    assert len(set(tried)) == len(tried)
    assert chosen.threshold in tried
    shares = {value: 0 if value < 0.3 else 5 / 6 if value < 0.5 else 1 for value in tried}
    assert abs(chosen.share - 0.6) == min(abs(share - 0.6) for share in shares.values())


class Rounded(Recorded):
    """Its small model ends at once, unless its first token is routed, and what it measures is rounded otherwise."""

    rounding = 1.0

    def run(self, requests):
        self.thresholds.append(requests[0].knobs["threshold"])
        events = []
        for i, each in enumerate(requests):
            routed = self.scores(each) * self.rounding < self.thresholds[-1]
            count = len(self.TOKENS) if routed[0] else 1
            events.append(
                Event(i, list(self.TOKENS[:count]), None, "stop", writers=routed[:count].astype(int).tolist())
            )
        return events


@pytest.mark.parametrize("rounding", [1 - 1e-6, 1.0, 1 + 1e-6])
def test_an_answer_that_ends_at_once_is_routed_whatever_rounding_does(models, asked, monkeypatch, rounding):
    monkeypatch.setattr(Rounded, "rounding", rounding)
    engine = Rounded(models)
    known = np.array([0.2, 0.5, 0.1, 0.9, 0.7, 0.4], np.float32)
    monkeypatch.setattr(threshold, "scores", lambda *args: known[: len(args[-1])])
    assert threshold.choose(engine, asked[:1], 0.3).share == pytest.approx(1 / 3)  # the first and the third token


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
        endless = [dataclasses.replace(request, stops=()) for request in asked]
        assert [event.tokens for event in events] == [naive.generate(model.cfg, model.params, r)[0] for r in endless]
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


def test_models_of_two_tokenizers_write_one_text(models, tmp_path, capsys):
    both = [*fleet.load(folders.write(tmp_path / "other", seed=3, extra="\n\n\n"), [], []), models[1]]
    routing = programs.build("bernoulli", both, Options(knobs=dict(share=0.4)))
    asked = route.ask(both, PROMPTS, TEMPLATE, routing)
    assert [len(each.renderings) for each in asked] == [2, 2, 2]
    engine = route.new_engine(both, routing, asked, rows=2, max_length=64)
    file = tmp_path / "a.jsonl"
    writers = route.generate(engine, both, PROMPTS, asked, output=str(file))
    assert 0 < sum(writers) < len(writers)
    rows = sorted(map(json.loads, file.read_text("utf-8").splitlines()), key=lambda row: row["index"])
    for row in rows:
        text = "".join(
            "".join(both[writer].tokenizer.decode(run)) for writer, run in runs(row["writers"], row["tokens"])
        )
        assert row["text"] == text or "\ufffd" in text
    for asks in (dict(share=0.5, compare=True), dict(share=None, compare=True)):
        with pytest.raises(UserError, match="(share|compare): got models of several tokenizers"):
            route.check(both, routing, **asks)
    with pytest.raises(UserError, match="program: got speculative for models of several tokenizers, expected one that"):
        programs.build("speculative", both, Options())
    with pytest.raises(UserError, match="renderings: got 0, expected 2, one for each model's tokenizer"):
        engine.submit(TEMPLATE)


def runs(writers, tokens):
    """Who wrote, and the tokens of each turn."""
    for writer, group in itertools.groupby(zip(writers, tokens, strict=True), key=lambda each: each[0]):
        yield writer, [token for _, token in group]


def test_vocabularies_that_are_padded_differently_are_one_in_the_fused_engine(models, tmp_path):
    """The large model's ids beyond the tokenizer's, however likely, are nobody's."""
    padded = fleet.load(folders.write(tmp_path, seed=1, padding=5), [], [])[0]
    head = padded.params["embed"]["weight"]
    rows = head.at[models[1].cfg.vocab :].set(50 * np.abs(head).max())
    padded = dataclasses.replace(padded, params={**padded.params, "embed": {"weight": rows}})
    pair = [models[0], padded]
    routing = programs.build("bernoulli", pair, Options(knobs=dict(share=0.5)))
    asked = route.ask(pair, PROMPTS, dataclasses.replace(TEMPLATE, temperature=1.0), routing)
    events = route.new_engine(pair, routing, asked, rows=2, max_length=64).run(asked)
    written = np.concatenate([event.tokens for event in events])
    assert written.max() < models[0].cfg.vocab
    assert len(set(np.concatenate([event.writers for event in events]))) == 2
