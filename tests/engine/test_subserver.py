"""When a subserver runs its model: the same rules as everywhere, on the clock that it has."""

import dataclasses
import time

import jax
import numpy as np
import pytest

from molora_jax.engine.blueprint import Blueprint, Model
from molora_jax.engine.fused import Schedule, level
from molora_jax.engine.handover import Parcel, columns
from molora_jax.engine.housing import Housing
from molora_jax.engine.messages import Entrance, Kind, Message
from molora_jax.engine.request import EngineConfig, Request, entry
from molora_jax.engine.run import Fleet
from molora_jax.engine.subserver import Subserver
from molora_jax.engine.table import without_drafts
from molora_jax.routing.programs.bernoulli import Bernoulli
from tests import fakes
from tests.routing import routed

MEGABYTE = 2**20
CONFIG = EngineConfig(max_rows=4, max_length=20, page_size=4, prefill_chunk=8, block=2)


@pytest.fixture(scope="module")
def blueprint() -> Blueprint:
    return Blueprint(Fleet((routed.model(0).cfg, routed.model(1).cfg), Bernoulli()), CONFIG, (np.dtype("float32"),) * 2)


@pytest.fixture(scope="module")
def depart(blueprint):
    return blueprint.departures({})


@pytest.fixture
def large(blueprint) -> Subserver:
    model = routed.model(1)
    params = jax.tree.map(lambda leaf: leaf.astype(np.float32), model.params)
    return Subserver(1, blueprint, dataclasses.replace(model, params=params), {}, jax.devices()[0])


def enter(subserver: Subserver, depart, slot: int, model: int) -> None:
    """A request in `slot`, number slot + 10, whose turn is `model`'s."""
    journey = depart(0, 2, {})
    turn = dataclasses.replace(journey.turn, model=np.int32(model))
    row = entry(CONFIG, Request(prompt=[1, 2]), anchor=[0, 0], journey=dataclasses.replace(journey, turn=turn))
    entrance = Entrance(np.int32(slot + 10), np.int32(slot), jax.device_get(without_drafts(row)), np.int32(5))
    subserver.handle(Message(Kind.ENTER, entrance))


def patience(subserver: Subserver, thresholds: tuple[int, int], max_wait: float = np.inf) -> float | None:
    seconds = level(np.ones(len(subserver.blueprint.plan().choices)))
    subserver.handle(Message(Kind.SCHEDULE, Schedule(np.array(thresholds), np.float32(max_wait), seconds)))
    return subserver.patience()


def test_a_model_waits_for_its_threshold_as_long_as_others_can_come(large, depart):
    assert patience(large, (1, 1)) is None
    for slot in range(3):
        enter(large, depart, slot, 0)
    assert patience(large, (1, 1)) is None
    enter(large, depart, 3, 1)
    assert patience(large, (1, 1)) == 0
    assert patience(large, (1, 4)) is None
    assert patience(large, (4, 4)) is None  # clamped to 2 each: of four requests, two wait somewhere
    for slot in range(2):
        large.handle(Message(Kind.STOP, (np.array([slot + 10]), np.array([slot]))))
    assert patience(large, (1, 4)) is None
    large.handle(Message(Kind.STOP, (np.array([12]), np.array([2]))))
    assert patience(large, (1, 4)) == 0
    large.handle(Message(Kind.STOP, (np.array([13]), np.array([3]))))
    assert patience(large, (1, 1)) is None


def test_nobody_waits_longer_than_the_most(large, depart):
    enter(large, depart, 0, 1)
    enter(large, depart, 1, 0)
    assert patience(large, (1, 2)) is None
    assert 3500 < patience(large, (1, 2), max_wait=3600) <= 3600
    assert patience(large, (1, 2), max_wait=0) == 0
    time.sleep(0.02)
    assert patience(large, (1, 2), max_wait=0.01) == 0


def test_prompts_are_read_ahead_while_there_is_nothing_else_to_do(large, depart):
    large.blueprint = dataclasses.replace(large.blueprint, shadow=True)
    enter(large, depart, 0, 0)
    enter(large, depart, 1, 1)
    assert patience(large, (1, 1)) == 0
    assert [message.kind for _, message in large.run()][0] == Kind.NEWS  # first whoever has the turn
    large.handle(Message(Kind.STOP, (np.array([11]), np.array([1]))))
    assert (large.patience(), large.ahead) == (0, 0)
    assert large.run() == []
    assert large.ahead == 2
    assert large.patience() is None
    assert large.housing.housed(0)
    standing = jax.tree.map(lambda leaf: np.array(leaf[:1]), large._standing)
    there = dataclasses.replace(standing.turn, model=np.array([1], np.int32))
    standing = dataclasses.replace(standing, anchor=np.zeros((1, 2), np.int32), turn=there)
    given = {name: np.zeros((1, 0), leaf.dtype) for name, leaf in columns(large._table).items()}
    one, drafts = np.array([2], np.int32), np.zeros((1, 0, 0), np.float32)
    parcel = Parcel(np.array([10], np.int32), one - 2, one, one, one - 2, standing, given, drafts)
    large.handle(Message(Kind.HAND, parcel))
    (_, news), *_ = [post for post in large.run() if post[1].kind == Kind.NEWS]
    counts = news.payload[1].counts
    assert counts.read.sum() == counts.runs.sum()  # at first the prompt's last token, which is always read


def test_who_is_elsewhere_makes_room_and_is_read_again(large, depart):
    large.housing = Housing(10, CONFIG.max_rows, 5)
    for slot in (0, 1, 2):
        enter(large, depart, slot, 1)
    assert patience(large, (1, 4)) == 0  # the third waits for pages, so that nobody waits for it
    assert [large.housing.housed(slot) for slot in range(3)] == [True, True, False]
    large._standing.turn.model[1] = 0
    assert large._standing.anchor[1, 1] == 0
    large._standing.anchor[1, 1] = 2
    assert patience(large, (1, 1)) == 0
    assert [large.housing.housed(slot) for slot in range(3)] == [True, False, True]
    assert large._standing.anchor[1, 1] == 0
    assert large.housing.evictions == 1
    large.handle(Message(Kind.STOP, (np.array([10]), np.array([0]))))
    assert large.housing.pool.available == 5


def test_a_model_that_no_program_runs_never_wakes(large):
    large.plan = dataclasses.replace(large.plan, choices=())
    assert large.patience() is None


def test_no_kv_table_is_copied():
    cfg, params = fakes.weights("gemma3", unrolled=False)
    pages = (32 * MEGABYTE // (4 * 2 * cfg.kv_width * 16 * cfg.layers),) * 2
    config = EngineConfig(max_rows=3, max_length=64, prefill_chunk=32, block=4, pages=pages)
    blueprint = Blueprint(Fleet((cfg, cfg), Bernoulli()), config, (np.dtype("float32"),) * 2)
    subserver = Subserver(1, blueprint, Model(cfg, params), {}, jax.devices()[0])
    size = subserver._memory.state.kv.rows.nbytes
    assert size > 30 * MEGABYTE
    for program in (subserver._look, subserver._enter):
        memory = program.memory_analysis()
        assert memory.temp_size_in_bytes < size / 8
        assert memory.alias_size_in_bytes >= size
    received = subserver._receive.memory_analysis()
    assert received.temp_size_in_bytes + received.output_size_in_bytes < MEGABYTE
