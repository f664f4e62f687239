"""In float64 every routed request gets, token for token, what a naive loop without a cache or a batch gives it."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molora_jax.engine.routed import RoutedEngine
from molora_jax.routing.programs.bernoulli import Bernoulli
from molora_jax.routing.programs.contrastive import Contrastive
from molora_jax.routing.programs.logit_ensemble import LogitEnsemble
from molora_jax.routing.programs.model_ensemble import ModelEnsemble
from molora_jax.routing.programs.proxy_tuning import ProxyTuning
from molora_jax.routing.programs.r2r import R2R
from molora_jax.routing.programs.relay import Relay
from molora_jax.routing.programs.single import Single
from molora_jax.routing.programs.spec_reason import SpecReason
from molora_jax.routing.programs.speculative import Speculative
from molora_jax.routing.programs.token_adapters import TokenAdapters
from tests import naive as alone
from tests.routing import catalogue, routed

R2R_PROGRAM = R2R(catalogue.R2R)
STAYS = (Contrastive, LogitEnsemble, ProxyTuning, Relay, Single, TokenAdapters)
"""Programs that fuse, have one writer, or wait for a command that these models never write."""


@functools.cache
def drawn(seed: int, i: int, threshold: float):
    """A request, and what the naive loop gives it."""
    request = dataclasses.replace(routed.requests(seed, 8)[i], knobs=dict(threshold=threshold))
    return request, routed.naive(R2R_PROGRAM, request)


def same(event, want) -> None:
    assert event.tokens == want.tokens
    assert event.writers == want.writers
    assert event.finished == want.finished


QUICK = (ModelEnsemble, ProxyTuning, R2R, SpecReason, TokenAdapters)
EVERY = [pytest.param(p, marks=[] if isinstance(p, QUICK) else pytest.mark.slow) for p in catalogue.PROGRAMS]


@pytest.mark.parametrize("program", EVERY, ids=map(catalogue.name, catalogue.PROGRAMS))
def test_every_program_gives_the_tokens_of_its_naive_loop(program):
    asked = routed.requests(0, 5, program)
    answers = [routed.naive(program, request) for request in asked]
    used = {model for answer in answers for model, _ in answer.runs}
    assert len(used) > 1 or isinstance(program, STAYS)
    for event, want in zip(routed.engine(program).run(asked), answers, strict=True):
        same(event, want)


SIZES = {
    "alone": dict(max_rows=1, page_size=16, prefill_chunk=64, block=1),
    "odd": dict(max_rows=3, page_size=3, prefill_chunk=7, block=5),
    "crowd": dict(max_rows=9, page_size=4, prefill_chunk=40, block=64),
    "tight": dict(max_rows=4, page_size=4, prefill_chunk=16, block=3, pages=(18, 9)),
}


@pytest.fixture(scope="module", params=SIZES)
def engine(request) -> RoutedEngine:
    return routed.engine(R2R_PROGRAM, **SIZES[request.param])


def drawn_seconds(data, choices: int) -> np.ndarray:
    """Step times that follow no size, level or sloping."""
    start = data.draw(st.permutations(range(1, choices + 1)))
    slopes = data.draw(st.lists(st.tuples(*[st.sampled_from([0.0, 0.5, 3.0])] * 2), min_size=choices, max_size=choices))
    return np.column_stack([start, slopes]).astype(np.float32)


@settings(max_examples=15)
@given(data=st.data())
def test_no_policy_order_or_share_changes_a_token(engine, data):
    count, seed = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 1))
    order = data.draw(st.permutations(range(8)))[:count]
    threshold = data.draw(st.sampled_from([0.0, 0.465, 2.0]))  # at the ends the large model always writes, or never
    asked, answers = zip(*(drawn(seed, i, threshold) for i in order), strict=True)
    engine.schedule = dataclasses.replace(
        engine.schedule,
        thresholds=np.array(data.draw(st.lists(st.integers(1, 12), min_size=2, max_size=2)), np.int32),
        max_wait=np.float32(data.draw(st.sampled_from([0.0, 20.0, np.inf]))),
        seconds=drawn_seconds(data, len(engine.plan.choices)),
    )
    gone = data.draw(st.sets(st.integers(0, count - 1), max_size=2))
    numbers = [engine.submit(request) for request in asked]
    given = {number: [] for number in numbers}
    finished = {}
    for look in range(10_000):
        if look == 2:
            for i in gone:
                engine.abort(numbers[i])
        if not engine.busy:
            break
        for event in engine.step():
            assert event.request not in finished
            given[event.request] += event.tokens
            if event.finished:
                finished[event.request] = event.finished
    for i, (number, want) in enumerate(zip(numbers, answers, strict=True)):
        if number in finished:
            assert (given[number], finished[number]) == (want.tokens, want.finished)
        else:
            assert i in gone
            assert given[number] == want.tokens[: len(given[number])]


def test_under_pressure_pages_are_taken_and_nothing_is_lost():
    engine = routed.engine(R2R_PROGRAM, **SIZES["tight"])
    asked, answers = zip(*(drawn(0, i, 0.465) for i in range(8)), strict=True)
    for event, want in zip(engine.run(asked), answers, strict=True):
        same(event, want)
    assert engine.lodging.evictions > 0


@pytest.mark.parametrize("writer", [0, 1])
def test_a_share_of_nothing_or_all_is_one_model_alone(engine, writer):
    asked = [
        dataclasses.replace(request, temperature=0.0, knobs=dict(threshold=(2.0, 0.0)[writer]))
        for request in routed.requests(5, 5)
    ]
    model = routed.model(writer)
    for event, request in zip(engine.run(asked), asked, strict=True):
        assert event.tokens == alone.generate(model.cfg, model.params, request)[0]
        assert set(event.writers) == {writer}


def test_a_knob_may_turn_while_its_request_runs():
    engine = routed.engine(Bernoulli(), block=4)
    request = dataclasses.replace(routed.requests(1, 1)[0], max_new_tokens=20, stops=(), knobs=dict(share=0.0))
    number, other = engine.submit(request), engine.submit(dataclasses.replace(request, seed=9))
    writers = {number: [], other: []}
    for look in range(100):
        for event in engine.step():
            writers[event.request] += event.writers
        if look == 1:
            engine.turn(number, dict(share=1.0))
            before = len(writers[number])
    assert 0 < before < 20
    assert writers[number] == [0] * before + [1] * (20 - before)
    assert writers[other] == [0] * 20


def test_speculation_gives_the_large_models_greedy_tokens():
    engine = routed.engine(Speculative())
    asked = [dataclasses.replace(request, temperature=0.0) for request in routed.requests(3, 6)]
    large = routed.model(1)
    for event, request in zip(engine.run(asked), asked, strict=True):
        assert event.tokens == alone.generate(large.cfg, large.params, request)[0]


def test_the_columns_of_an_event_are_those_of_its_tokens():
    program = R2R_PROGRAM
    engine = routed.engine(program)
    request = dataclasses.replace(routed.requests(2, 1)[0], max_new_tokens=12, stops=(), logprobs=True)
    event = engine.run([request])[0]
    rows = []
    for i, writer in enumerate(event.writers):
        logits, _ = routed.reader(writer)(list(request.prompt) + event.tokens[:i], ())
        rows.append(logits[-1])
    logs = np.array([row - np.logaddexp.reduce(row) for row in rows])
    np.testing.assert_allclose(event.logprobs, logs[np.arange(12), event.tokens], rtol=1e-6)
    np.testing.assert_allclose(event.entropy, -np.sum(np.exp(logs) * logs, axis=-1), rtol=1e-5, atol=1e-6)
