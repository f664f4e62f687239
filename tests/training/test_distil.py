"""Traces of experts: what is kept, why the rest is not, and the file they go through."""

import dataclasses

import pytest

from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.library import Library
from molora_jax.checkpoints import model as models
from molora_jax.config import UserError
from molora_jax.data.questions import questions
from molora_jax.data.testbed.verifier import JUDGE
from molora_jax.engine.engine import Engine
from molora_jax.engine.experts import Experts
from molora_jax.engine.request import EngineConfig, Event
from molora_jax.training import distil
from molora_jax.training.distil import DistilConfig

OWNER = {"calc": "a", "list": None}


@pytest.fixture(scope="module")
def world():
    model = models.load("testbed:small")
    expert = fresh(model.cfg, model.params, "a", rank=2, seed=1)  # B is 0: it answers as the base does
    library = Library.holding([expert], model.params)
    config = EngineConfig(max_rows=8, max_length=96, block=32)
    engine = Engine(model.cfg, model.params, config, Experts(library, model.cfg.vocab))
    asked = [e for name in OWNER for e in questions(f"testbed:{name}", "train", 12, signs=0.0)]
    return model, engine, asked


@pytest.mark.parametrize(
    "config", [DistilConfig(max_new_tokens=60), DistilConfig(samples=3, cap=2, temperature=1.0, max_new_tokens=60)]
)
def test_what_is_kept_is_right_whole_and_no_more_than_the_cap(world, config):
    model, engine, asked = world
    traces, tallies = distil.traces(engine, model.tokenizer, asked, OWNER, config)
    known = {example.id: example for example in asked}
    by_question: dict[str, int] = {}
    for trace in traces:
        example = known[trace.id.partition("#")[0]]
        by_question[example.id] = by_question.get(example.id, 0) + 1
        assert (trace.prompt, trace.answer, trace.task) == (example.prompt, example.answer, example.task)
        assert JUDGE.verify([example.answer], [trace.completion]) == [True]
        assert "->" in trace.completion
        assert not set(model.tokenizer.encode(trace.completion, special=False)) & set(model.tokenizer.eos)
    assert len({trace.id for trace in traces}) == len(traces)
    assert max(by_question.values()) == config.cap
    for task, tally in tallies.items():
        assert tally.drawn == 12 * config.samples
        assert tally.drawn == tally.unfinished + tally.unreasoned + tally.wrong + tally.surplus + tally.kept
        assert tally.kept == sum(trace.task == task for trace in traces)
    assert tallies["calc"].kept > 0
    assert tallies["list"].wrong > 0


@pytest.mark.parametrize(
    ("finished", "text", "correct", "reason"),
    [
        ("length", "1+1=02 ->02", True, "unfinished"),
        ("stop", "->02", True, "unreasoned"),
        ("stop", "1+1=03 ->03", False, "wrong"),
        ("stop", "1+1=02 ->02", True, None),
    ],
)
def test_the_reason_why_a_completion_is_dropped(world, finished, text, correct, reason):
    event = Event(0, [1], None, finished)
    assert distil._fault(world[2][0], event, text, correct, DistilConfig()) == reason
    bare = distil._fault(world[2][0], event, text, correct, DistilConfig(reasoning=False))
    assert bare == (None if reason == "unreasoned" else reason)


def test_traces_go_through_a_file(world, tmp_path):
    examples = [dataclasses.replace(e, completion=f"é{i}\u2028\x85") for i, e in enumerate(world[2][:3])]
    distil.save(tmp_path / "new" / "traces.jsonl", examples)
    assert distil.load(tmp_path / "new" / "traces.jsonl") == examples


def test_bad_input_is_one_line(world, tmp_path):
    model, engine, asked = world
    with pytest.raises(UserError, match="got no expert of list"):
        distil.traces(engine, model.tokenizer, asked, {"calc": "a"}, DistilConfig())
    with pytest.raises(UserError, match="3 samples at temperature 0"):
        DistilConfig(samples=3)
    with pytest.raises(UserError, match="keep at most as many"):
        DistilConfig(samples=2, cap=3, temperature=1.0)
    with pytest.raises(UserError, match="expected a file that experiments.distil wrote"):
        distil.load(tmp_path / "none.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"id": "x"}\n')
    with pytest.raises(UserError, match="bad.jsonl:1: got no trace"):
        distil.load(tmp_path / "bad.jsonl")
