"""An engine of several models: what it refuses, counts, copies and compiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.compilation import counted
from molora_jax.config import UserError
from molora_jax.engine import fused, tuning
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.engine.routed import Model, RoutedEngine
from molora_jax.routing.program import LARGE, SMALL, Mode, Program, decide, select
from molora_jax.routing.programs.bernoulli import Bernoulli
from molora_jax.routing.programs.model_ensemble import ModelEnsemble
from tests import fakes
from tests.routing import routed

CONFIG = EngineConfig(max_rows=5, max_length=48, page_size=4, prefill_chunk=20, block=6)
MEGABYTE = 2**20


@pytest.fixture(scope="module")
def models() -> list[Model]:
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), [routed.model(0).params, routed.model(1, 6).params])
    return [Model(routed.model(0).cfg, narrow[0]), Model(routed.model(1, 6).cfg, narrow[1])]


@pytest.fixture(scope="module")
def engine(models) -> RoutedEngine:
    engine = RoutedEngine(models, Bernoulli(), config=CONFIG)
    engine.warm_up()
    return engine


def request(seed: int, share: float, **fields) -> Request:
    return Request(**dict(prompt=(1, 2, 3, seed % 5), max_new_tokens=16, seed=seed, knobs=dict(share=share)) | fields)


def test_more_requests_than_rows_come_back_in_their_order(engine):
    asked = [request(i, 0.4, max_new_tokens=3 + i) for i in range(12)]
    events = engine.run(asked)
    assert [len(event.tokens) for event in events] == [3 + i for i in range(12)]
    assert {event.finished for event in events} == {"length"}
    alone = [engine.run([one])[0].tokens for one in asked[:4]]
    assert alone == [event.tokens for event in events[:4]]
    assert not engine.busy
    assert engine.run([]) == []


class Lost(Bernoulli):
    """Asks for a run that nothing was compiled for, once a model has written."""

    def step(self, params, knobs, state, model, sig):
        return state, decide(LARGE, mode=Mode.SCORE)


def test_a_decision_that_was_not_declared_is_told_in_one_line(models):
    engine = RoutedEngine(models, Lost(), config=CONFIG)
    with pytest.raises(UserError, match="Lost: got a decision for another run, expected one of .*DECODE by model 1"):
        engine.run([request(0, 0.5), request(1, 0.5)])
    assert not engine.busy


class Judged(Program):
    """Twenty tokens of the small model, held until the large one has looked at the last two of them."""

    models, modes, draft, signals = 2, frozenset({Mode.DECODE, Mode.SCORE}), 2, frozenset({"span_logprobs"})

    def init(self, params, knobs, key):
        return jnp.int32(0)

    def step(self, params, knobs, state, model, sig):
        count = state + 1
        held = select(count < 20, decide(SMALL, hold=count), decide(LARGE, mode=Mode.SCORE, hold=count))
        return count, select(count <= 20, held, decide(SMALL))

    def read(self, params, knobs, state, logits):
        return logits[0]


def test_more_is_held_than_a_bucket_has_room_for(engine, models):
    """What a run judges is the end of what is held; the rest it only reads, in as many parts as it takes."""
    config = dataclasses.replace(CONFIG, max_rows=1, prefill_chunk=4)
    judged = RoutedEngine(models, Judged(), config=config)
    assert max(bucket.tokens for _, bucket in judged.plan.choices) < 20
    asked = Request(prompt=(1, 2, 3), max_new_tokens=30)
    got = judged.run([asked])[0]
    assert got.tokens == engine.run([dataclasses.replace(asked, knobs=dict(share=0.0))])[0].tokens
    assert len(got.tokens) == 30
    assert judged.counts.runs[[run.mode == Mode.SCORE for run, _ in judged.plan.choices]].sum() >= 2


class LostAtOnce(Bernoulli):
    """Begins, where a knob says so, with a run that nothing was compiled for."""

    knobs = {"share": 0.1, "lost": 0.0}

    def start(self, params, knobs, state):
        return state, select(knobs["lost"] > 0, decide(LARGE, mode=Mode.SCORE), decide(SMALL))


@pytest.mark.slow
def test_a_start_that_was_not_declared_takes_no_slot(models):
    engine = RoutedEngine(models, LostAtOnce(), config=dataclasses.replace(CONFIG, max_rows=1))
    for _ in range(2):
        with pytest.raises(UserError, match="LostAtOnce: got a decision for another run"):
            engine.run([request(0, 0.5, knobs=dict(lost=1.0))])
        assert not engine.busy
    assert len(engine.run([request(0, 0.5)])[0].tokens) == 16


def test_nothing_compiles_after_the_warm_up(engine):
    engine.run([request(0, 0.5)])
    with counted() as count:
        engine.run([request(i, 0.5, prompt=tuple(range(1 + i))) for i in range(9)])
    assert count.programs == 0


def test_counts_add_up_to_what_was_given(engine):
    before = engine.counts
    events = engine.run([request(i, 0.4) for i in range(7)])
    counts = jax.tree.map(np.subtract, engine.counts, before)
    written = np.bincount(np.concatenate([event.writers for event in events]), minlength=2)
    small, large = (
        counts.rows[: len(engine.plan.choices) // 2].sum(),
        counts.rows[len(engine.plan.choices) // 2 :].sum(),
    )
    assert counts.commits.sum() == written.sum() == 7 * 16
    assert large == written[1] > 0
    assert small == 7 * 16  # it tries every token
    assert counts.moves.sum() == small + large
    assert counts.moves[:, -1].sum() == 7
    np.testing.assert_array_equal(counts.moves[0, 1], written[1])
    # each model reads every token but the last, and the small one the large one's dropped tries never
    tokens = np.array([bucket.tokens for _, bucket in engine.plan.choices])
    assert np.all(counts.read <= counts.runs * tokens)
    assert counts.read[: tokens.size // 2].sum() >= 7 * (4 + 15)


def test_an_abort_frees_the_slot_and_touches_nobody(engine):
    asked = [request(i, 0.3) for i in range(5)]
    want = [event.tokens for event in engine.run(asked)]
    numbers = [engine.submit(one) for one in [*asked, request(9, 0.0)]]  # the last waits for a slot
    tokens = {number: [] for number in numbers}
    for event in engine.step():
        tokens[event.request] += event.tokens
    engine.abort(numbers[1])
    engine.abort(numbers[5])
    while engine.busy:
        for event in engine.step():
            tokens[event.request] += event.tokens
    assert [tokens[number] for number in (numbers[0], *numbers[2:5])] == [want[0], *want[2:]]
    assert not tokens[numbers[5]]
    assert len(tokens[numbers[1]]) < 16
    assert len(engine.run(asked)) == 5


def test_thresholds_delay_the_large_models_runs(engine):
    asked = [request(i, 0.3) for i in range(5)]
    fixed = dataclasses.replace(engine.schedule, max_wait=np.float32(np.inf))
    rows = {}
    for threshold in (1, 4):
        engine.schedule = dataclasses.replace(fixed, thresholds=np.array([1, threshold], np.int32))
        before = engine.counts
        tokens = [event.tokens for event in engine.run(asked)]
        counts = jax.tree.map(np.subtract, engine.counts, before)
        large = len(engine.plan.choices) // 2
        rows[threshold] = counts.rows[large:].sum() / counts.runs[large:].sum(), tokens
    engine.schedule = fixed
    assert rows[1][1] == rows[4][1]
    assert rows[4][0] > rows[1][0]


def test_times_are_measured_and_thresholds_follow_from_them(engine):
    measured = engine.time(context=20, repeats=1)
    assert measured.seconds.shape == (len(engine.plan.choices), 3)
    assert np.all(measured.seconds >= 0)
    assert np.all(measured.seconds[:, 0] > 0)
    assert measured.look > 0
    assert not engine.busy
    engine.run([request(i, 0.4) for i in range(5)])
    slow = fused.level(np.where([run.model for run, _ in engine.plan.choices], 100.0, 1.0))
    engine.schedule = dataclasses.replace(engine.schedule, seconds=slow)
    block, moves, chosen = engine.block, tuning.routing(engine.counts), {}
    for engine.block, engine._look_seconds in ((block, 0.0), (1, 1000.0)):
        best = engine.tune()
        times = tuning.step_times(engine.plan, slow, engine._look_seconds)
        rates = {b: tuning.predicted(moves, times, (1, b), 5) for b in range(1, 6)}
        assert best == (1, max(rates, key=rates.get))
        chosen[engine.block] = best[1]
    assert chosen[block] > chosen[1]  # the longer a look, the less does it pay to wait for a large model
    engine.block, engine._look_seconds = block, 0.0
    engine.schedule = dataclasses.replace(engine.schedule, thresholds=np.array([1, 1], np.int32))


def test_thresholds_follow_the_requests_while_they_run(engine):
    slow = fused.level(np.where([run.model for run, _ in engine.plan.choices], 10.0, 1.0))
    before, engine.schedule = engine.schedule, dataclasses.replace(engine.schedule, seconds=slow)
    engine._tune_every = 1
    asked = [request(i, 0.4) for i in range(5)]
    for one in asked:
        engine.submit(one)
    chosen = []
    while engine.busy:
        engine.step()
        chosen.append(engine.schedule.thresholds.tolist())
    engine._tune_every, engine.schedule = 0, before
    assert max(chosen)[1] > 1
    assert chosen[-1] == [1, 1]  # of one request alone


def test_usage_tells_what_each_model_did(engine):
    before = engine.usage
    engine.run([request(i, 0.4) for i in range(5)])
    small, large = engine.usage
    assert small.rows - before[0].rows == 5 * 16
    assert 0 < large.rows - before[1].rows < 5 * 16
    assert small.runs > before[0].runs
    assert min(small.padding, large.padding) >= 1


def test_no_kv_table_is_copied():
    cfg, params = fakes.weights("gemma3", unrolled=False)
    row = 4 * 2 * cfg.kv_width
    pages = (32 * MEGABYTE // (row * 16 * cfg.layers),) * 2
    config = EngineConfig(max_rows=3, max_length=64, prefill_chunk=32, block=4, pages=pages)
    engine = RoutedEngine([Model(cfg, params)] * 2, Bernoulli(), config=config)
    assert engine.kv_bytes > 60 * MEGABYTE
    for program in (engine._step, engine._enter):
        memory = program.memory_analysis()
        assert memory.temp_size_in_bytes < engine.kv_bytes / 8
        assert memory.alias_size_in_bytes >= engine.kv_bytes


def test_bad_requests_get_one_line(engine, models):
    with pytest.raises(UserError, match="models: got 2, expected 3"):
        RoutedEngine(models, ModelEnsemble(), config=CONFIG)
    with pytest.raises(UserError, match="pages: got 3, expected 2, one for each model"):
        RoutedEngine(models, Bernoulli(), config=dataclasses.replace(CONFIG, pages=(9, 9, 9)))
    with pytest.raises(UserError, match="knob treshold: Bernoulli has no such knob, expected one of: share"):
        engine.submit(Request(prompt=[1], max_new_tokens=3, knobs=dict(treshold=1)))
    with pytest.raises(UserError, match="adapter: got 'poet', expected none"):
        engine.submit(Request(prompt=[1], max_new_tokens=3, adapter="poet"))
    with pytest.raises(UserError, match="expected at most 48 together"):
        engine.submit(Request(prompt=[1], max_new_tokens=48))
    with pytest.raises(UserError, match="expected 0 to 11"):
        engine.submit(Request(prompt=[12], max_new_tokens=3))
    engine.submit(request(0, 0.0))
    with pytest.raises(UserError, match="time: got an engine with requests"):
        engine.time()
    engine.abort(max(engine._running, default=0))
    while engine.busy:
        engine.step()
