"""An engine whose models run apart: what it refuses, counts and compiles, and how it ends."""

import dataclasses
import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.compilation import counted
from molora_jax.config import UserError
from molora_jax.engine.fused import eager, level
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.engine.routed import Model
from molora_jax.engine.separate import SeparateEngine, in_threads
from molora_jax.engine.threads import Threads
from molora_jax.routing.programs.bernoulli import Bernoulli
from molora_jax.routing.programs.logit_ensemble import LogitEnsemble
from molora_jax.routing.programs.model_ensemble import ModelEnsemble
from tests.engine.test_routed import Lost
from tests.routing import routed

CONFIG = EngineConfig(max_rows=3, max_length=48, page_size=4, prefill_chunk=20, block=6)


@pytest.fixture(scope="module")
def models() -> list[Model]:
    narrow = lambda model: jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model.params)
    return [Model(model.cfg, narrow(model)) for model in (routed.model(0), routed.model(1, 6))]


@pytest.fixture(scope="module")
def engine(models):
    with in_threads(models, Bernoulli(), config=CONFIG) as engine:
        engine.warm_up()
        yield engine


def request(seed: int, share: float, **fields) -> Request:
    return Request(**dict(prompt=(1, 2, 3, seed % 5), max_new_tokens=16, seed=seed, knobs=dict(share=share)) | fields)


def test_more_requests_than_rows_come_back_in_their_order(engine):
    events = engine.run([request(i, 0.4, max_new_tokens=3 + i) for i in range(9)])
    assert [len(event.tokens) for event in events] == [3 + i for i in range(9)]
    assert {event.finished for event in events} == {"length"}
    assert not engine.busy
    assert engine.run([]) == []


def test_nothing_compiles_after_the_warm_up(engine):
    with counted() as count:
        engine.run([request(i, 0.5, prompt=tuple(range(1 + i))) for i in range(9)])
        number = engine.submit(request(0, 0.5))
        engine.step()
        engine.turn(number, dict(share=0.1))
        engine.abort(number)
        engine.run([request(1, 0.5)])
    assert count.programs == 0


def test_counts_add_up_to_what_was_given(engine):
    before = engine.counts
    events = engine.run([request(i, 0.4) for i in range(7)])
    moves, commits, runs, rows = (
        getattr(engine.counts, name) - getattr(before, name) for name in ("moves", "commits", "runs", "rows")
    )
    large = sum(event.writers.count(1) for event in events)
    assert np.sum(commits) == 7 * 16
    assert np.sum(moves[:, -1]) == 7
    assert moves[0, 1] == large > 0
    assert np.sum(moves) == np.sum(rows)
    assert np.all(rows <= runs * [bucket.rows for _, bucket in engine.plan.choices])


@pytest.mark.parametrize("writer", [0, 1])
def test_a_share_of_nothing_or_all_is_one_model_alone(engine, writer):
    events = engine.run([request(i, float(writer)) for i in range(4)])
    assert {model for event in events for model in event.writers} == {writer}


def test_what_cannot_run_is_refused(models, engine):
    with pytest.raises(UserError, match="LogitEnsemble, which fuses"):
        in_threads(models, LogitEnsemble())
    with pytest.raises(UserError, match="models: got 2, expected 3"):
        in_threads(models, ModelEnsemble(models=3))
    with pytest.raises(UserError, match="no such knob"):
        engine.submit(Request(prompt=[1], max_new_tokens=1, knobs=dict(threshold=1.0)))
    with pytest.raises(UserError, match="expected at most 48"):
        engine.submit(Request(prompt=[1] * 40, max_new_tokens=10))


class Idle:
    """A subserver that never has anything to do, until it gets a message."""

    def warm_up(self):
        pass

    def patience(self):
        return None

    def handle(self, message):
        raise ZeroDivisionError("a model is\nnot a number")


def unloadable():
    raise FileNotFoundError("model.safetensors")


@pytest.mark.parametrize(
    ("build", "line"), [(Idle, "ZeroDivisionError: a model is"), (unloadable, "FileNotFoundError")]
)
def test_a_subserver_that_fails_is_told_in_one_line_and_ends_all(engine, build, line):
    before = threading.active_count()
    failing = SeparateEngine(engine.blueprint, {}, Threads([Idle, build]))
    match = rf"^subserver of models\[.\]: ended with {line}.*; start the engine anew$"
    with pytest.raises(UserError, match=match):
        failing.run([request(0, 0.5)])
    with pytest.raises(UserError, match=match):
        failing.submit(request(0, 0.5))
    with pytest.raises(UserError, match=match):
        failing.step()
    assert threading.active_count() == before


@pytest.mark.slow
def test_a_decision_that_was_not_declared_is_told_in_one_line(models):
    match = "ended with .*Lost: got a decision for another run"
    with in_threads(models, Lost(), config=CONFIG) as engine, pytest.raises(UserError, match=match):
        engine.run([request(0, 0.5)])


def test_a_closed_engine_says_so_and_leaves_no_thread(engine):
    before = threading.active_count()
    with SeparateEngine(engine.blueprint, {}, Threads([Idle, Idle])) as idle:
        idle.warm_up()
        assert threading.active_count() == before + 2
    assert threading.active_count() == before
    for asked in (lambda: idle.submit(request(0, 0.5)), idle.time, idle.warm_up):
        with pytest.raises(UserError, match="closed"):
            asked()


def test_an_engine_that_is_forgotten_leaves_no_thread(engine):
    before = threading.active_count()
    forgotten = SeparateEngine(engine.blueprint, {}, Threads([Idle, Idle]))
    del forgotten
    gc.collect()
    assert threading.active_count() == before


def test_times_are_measured_one_subserver_after_another_and_thresholds_follow(engine):
    measured = engine.time(context=20, repeats=1)
    assert measured.seconds.shape == (len(engine.plan.choices), 3)
    assert np.all(measured.seconds[:, 0] > 0)
    assert measured.look > 0
    np.testing.assert_array_equal(engine.schedule.seconds, measured.seconds)
    want = [event.tokens for event in engine.run([request(i, 0.4) for i in range(5)])]
    slow = level(np.where([run.model for run, _ in engine.plan.choices], 100.0, 1.0))
    engine.schedule = dataclasses.replace(engine.schedule, seconds=slow)
    best = engine.tune()
    assert best[0] == 1
    assert best[1] > 1
    np.testing.assert_array_equal(engine.schedule.thresholds, best)
    assert [event.tokens for event in engine.run([request(i, 0.4) for i in range(5)])] == want
    number = engine.submit(request(0, 0.0))
    with pytest.raises(UserError, match="time: got an engine with requests"):
        engine.time()
    engine.abort(number)
    engine.schedule = eager(engine.plan)


def test_its_memory_is_that_of_all_models(engine):
    assert engine.kv_bytes == sum(2 * cfg.layers * 36 * 4 * cfg.kv_width * 4 for cfg in engine.fleet.cfgs)
