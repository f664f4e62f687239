"""Slots and pages of several models: the oldest always gets what it needs, and nobody's pages are lost or shared."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molora_jax.config import UserError
from molora_jax.engine.lodging import Lodging, pages_within


def test_the_idle_make_room_the_youngest_first():
    lodging = Lodging((4, 4), slots=3, length=8, page_size=4)
    a, b, c = (lodging.seat(8) for _ in range(3))
    assert lodging.lodge(a, 0)
    assert lodging.lodge(b, 0)
    assert not lodging.lodge(c, 0)
    assert lodging.lodge(b, 1)
    assert lodging.lodge(c, 1)
    # a takes what c has left at model 1, and c what b has left at model 0: b is younger than a
    assert {guest.slot for guest in lodging.rehouse([a, b, c], [(1,), (1,), (0,)])} == {0, 1, 2}
    assert [[guest.lodged(model) for model in (0, 1)] for guest in (a, b, c)] == [[1, 1], [0, 1], [1, 0]]
    assert lodging.evictions == 2


def test_who_runs_there_is_never_moved():
    lodging = Lodging((2, 2), slots=2, length=8, page_size=4)
    a, b = lodging.seat(5), lodging.seat(8)
    assert lodging.lodge(b, 0)
    assert lodging.rehouse([a, b], [(0,), (0,)]) == []
    assert b.lodged(0)
    lodging.give_back(b)
    assert lodging.rehouse([a], [(0,)]) == [a]


def test_two_who_hold_what_the_other_needs_do_not_block_each_other():
    lodging = Lodging((2, 2), slots=2, length=8, page_size=4)
    a, b = lodging.seat(8), lodging.seat(8)
    lodging.lodge(a, 0)
    lodging.lodge(b, 1)
    lodging.rehouse([a, b], [(0, 1), (0, 1)])
    assert a.lodged(0)
    assert a.lodged(1)
    assert b.pages == [[], []]


@given(st.data())
def test_somebody_can_always_run_and_pages_are_nobodys_twice(data):
    models, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    pages = [data.draw(st.integers(size, 3 * size)) for _ in range(models)]
    lodging = Lodging(pages, slots=4, length=4 * size, page_size=4)
    guests = []
    for _ in range(20):
        if lodging.free and data.draw(st.booleans()):
            guests.append(lodging.seat(data.draw(st.integers(1, 4 * size))))
        elif guests and data.draw(st.booleans()):
            lodging.give_back(guests.pop(data.draw(st.integers(0, len(guests) - 1))))
        needs = [tuple(data.draw(st.sets(st.integers(0, models - 1), min_size=1))) for _ in guests]
        before = [[list(own) for own in guest.pages] for guest in guests]
        changed = {guest.slot for guest in lodging.rehouse(guests, needs)}
        runs = [all(map(guest.lodged, models)) for guest, models in zip(guests, needs, strict=True)]
        assert any(runs) or not guests
        for guest, old in zip(guests, before, strict=True):
            assert guest.slot in changed or guest.pages == old
        for model, pool in enumerate(lodging.pools):
            held = [page for guest in guests for page in guest.pages[model]]
            assert len(held) == len(set(held)) == pool.pages - pool.available
    for guest in guests:
        lodging.give_back(guest)
    assert [pool.available for pool in lodging.pools] == pages


def test_a_budget_is_shared_by_all_models():
    assert pages_within(1000, [30, 60], most=50) == (11, 11)
    assert pages_within(10_000, [30, 60], most=50) == (50, 50)
    with pytest.raises(UserError, match="kv_bytes: got 80, expected at least 90"):
        pages_within(80, [30, 60], most=50)
    with pytest.raises(UserError, match="needs 3 KV pages of 4 tokens, got 2 in all"):
        Lodging((5, 2), slots=1, length=20, page_size=4).check(9)
