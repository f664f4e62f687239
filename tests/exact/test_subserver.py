"""In float64 a request gets the same tokens when models run apart, whoever is quick, waits, ends or is aborted."""

import dataclasses

import jax
import numpy as np
import pytest

from molora_jax.engine.blueprint import Blueprint
from molora_jax.engine.housing import Housing
from molora_jax.engine.messages import Kind, Message, decode, forms
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.engine.run import Fleet
from molora_jax.engine.separate import SeparateEngine
from molora_jax.engine.subserver import Subserver
from molora_jax.engine.threads import Threads
from molora_jax.routing.program import Program
from molora_jax.routing.programs.model_ensemble import ModelEnsemble
from molora_jax.routing.programs.r2r import R2R
from molora_jax.routing.programs.spec_reason import SpecReason
from molora_jax.routing.programs.speculative import Speculative
from tests.routing import catalogue, routed
from tests.routing.puppets import Puppets

CONFIG = EngineConfig(max_rows=3, max_length=routed.LENGTH, page_size=4, prefill_chunk=16, block=3)
KNOBS = {
    "R2R": [dict(threshold=value) for value in (0.0, 0.3, 0.5, 0.6, 2.0)],
    "ModelEnsemble": [dict(w0=a, w1=b, w2=c) for a, b, c in ((1, 1, 1), (5, 1, 0), (0, 0, 1), (9, 0, 1))],
    "SpecReason": [dict(threshold=value) for value in (-1.0, 0.5, 5.0)],
    "Speculative": [{}],
}
"""From one model alone to the other alone, and between."""
PROGRAMS = [
    R2R(catalogue.R2R),
    ModelEnsemble(),
    SpecReason((1,), digits=(3, 4), longest=9),  # holds more tokens than a look shows
    Speculative(),
]


@dataclasses.dataclass
class Fleets:
    """A program, and the subservers of its models, which any number of engines may use one after another."""

    program: Program
    blueprint: Blueprint
    subservers: list[Subserver]

    @property
    def params(self):
        return catalogue.params(self.program)

    def puppets(self, seed: int) -> SeparateEngine:
        table = jax.eval_shape(lambda: self.blueprint.table(self.blueprint.departures(self.params)))
        return SeparateEngine(self.blueprint, self.params, Puppets(self.subservers, forms(table), seed))

    def threads(self) -> SeparateEngine:
        return SeparateEngine(self.blueprint, self.params, Threads([lambda own=own: own for own in self.subservers]))

    def provide(self, *, tight: bool, shadow: bool) -> int:
        """Gives every subserver fewer pages than slots could fill, or all; the tokens that were read ahead so far."""
        for own in self.subservers:
            width = own._memory.tables.shape[2]
            own.housing = Housing(2 * width if tight else 3 * width, 3, width)
            own.blueprint = dataclasses.replace(own.blueprint, shadow=shadow)
        return sum(own.ahead for own in self.subservers)

    def asked(self, seed: int, count: int) -> list[Request]:
        rng, knobs = np.random.default_rng(seed), KNOBS[type(self.program).__name__]
        return [dataclasses.replace(one, knobs=rng.choice(knobs)) for one in routed.requests(seed, count)]


@pytest.fixture(scope="module", params=PROGRAMS, ids=lambda program: type(program).__name__)
def fleet(request) -> Fleets:
    program = request.param
    models = [routed.model(i) for i in range(program.models)]
    dtypes = tuple(model.dtype for model in models)
    blueprint = Blueprint(Fleet(tuple(model.cfg for model in models), program), CONFIG, dtypes, entropy=True)
    build = lambda i, model: Subserver(i, blueprint, model, catalogue.params(program), jax.devices()[0])
    return Fleets(program, blueprint, [build(i, model) for i, model in enumerate(models)])


def shuffle(engine: SeparateEngine, rng) -> None:
    """Other thresholds and patience, from now on."""
    engine.schedule = dataclasses.replace(
        engine.schedule,
        thresholds=rng.integers(1, 6, len(engine.plan.runs)),
        max_wait=rng.choice([0.0, 1e-3, np.inf]),
        seconds=np.column_stack(
            [rng.permutation(len(engine.plan.choices)) + 1, rng.choice([0.0, 2.0], (len(engine.plan.choices), 2))]
        ),
    )


def same(program: Program, request: Request, event) -> None:
    want = routed.naive(program, request)
    assert event.tokens == want.tokens
    assert event.writers == want.writers
    assert event.finished == want.finished


@pytest.mark.parametrize("seed", range(6))
def test_no_order_of_events_changes_a_token_or_stalls(fleet, seed):
    rng, engine = np.random.default_rng(seed), fleet.puppets(seed)
    ahead = fleet.provide(tight=seed % 2 == 1, shadow=seed >= 3)
    asked = fleet.asked(seed, 12)
    numbers = [engine.submit(request) for request in asked]
    gone = rng.choice(numbers, 5, replace=False).tolist()
    given, finished, looks = {number: [] for number in numbers}, {}, 0
    while engine.busy:
        looks += 1
        if looks % 7 == 0:
            shuffle(engine, rng)
        if gone and rng.random() < 0.3:
            engine.abort(gone.pop())
        events = engine.step()
        assert events or looks < 5000, "nobody can act, but not all have ended"
        for event in events:
            assert event.request not in finished
            given[event.request].append(event)
            if event.finished:
                finished[event.request] = event.finished
    for number, request in zip(numbers, asked, strict=True):
        want = routed.naive(fleet.program, request)
        tokens = [token for event in given[number] for token in event.tokens]
        writers = [writer for event in given[number] for writer in event.writers]
        assert tokens == want.tokens[: len(tokens)]
        assert writers == want.writers[: len(tokens)]
        if number in finished:
            assert (len(tokens), finished[number]) == (len(want.tokens), want.finished)
    assert len(finished) >= 7
    assert engine._workers.sent[Kind.HAND]
    evictions = sum(own.housing.evictions for own in fleet.subservers)
    assert evictions == 0 if seed % 2 == 0 else evictions > 0 or seed == 5  # whose aborts may leave room enough
    assert (sum(own.ahead for own in fleet.subservers) > ahead) == (seed >= 3)
    assert all(
        own.housing.pool.available == own.housing.pool.pages for own in fleet.subservers if not own._numbers.any()
    )


def test_threads_give_the_same(fleet):
    with fleet.threads() as engine:
        engine.warm_up()
        for seed in (10, 11):
            shuffle(engine, np.random.default_rng(seed))
            asked = fleet.asked(seed, 8)
            for request, event in zip(asked, engine.run(asked), strict=True):
                same(fleet.program, request, event)


def test_messages_about_whom_a_slot_had_before_change_nothing(fleet):
    engine, first = fleet.puppets(0), fleet.subservers[0]
    old, new = engine.submit(fleet.asked(0, 1)[0]), 99
    engine._admit()
    entrance = decode(engine._workers._mail[0].pop(), engine._workers.forms).payload
    first.handle(Message(Kind.ENTER, dataclasses.replace(entrance, number=np.int32(new))))
    first.handle(Message(Kind.STOP, (np.array([old]), np.array([entrance.slot]))))
    assert first.patience() == 0
    first.handle(Message(Kind.STOP, (np.array([new]), np.array([entrance.slot]))))
    assert first.patience() is None


@pytest.mark.parametrize("fleet", PROGRAMS[:1], ids=["R2R"], indirect=True)
def test_a_knob_turns_at_every_model_while_its_request_runs(fleet):
    engine = fleet.puppets(3)
    request = dataclasses.replace(routed.requests(1, 1)[0], max_new_tokens=20, stops=(), knobs=dict(threshold=2.0))
    number, other = engine.submit(request), engine.submit(dataclasses.replace(request, seed=9))
    writers, turned = {number: [], other: []}, False
    while engine.busy:
        for event in engine.step():
            writers[event.request] += event.writers
        if writers[number] and not turned:
            engine.turn(number, dict(threshold=0.0))
            turned = True
    small = writers[number].count(0)
    assert 0 < small < 20
    assert writers[number] == [0] * small + [1] * (20 - small)
    assert writers[other] == [0] * 20
