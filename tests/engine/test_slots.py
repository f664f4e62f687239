"""Admission: whatever is leased, read, shared, aborted and given back, every request finds its own keys and values."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from molora_jax.config import UserError
from molora_jax.engine.slots import Slots, pages_for, ring_pages
from tests import fakes

TOKEN = st.integers(0, 1)  # two tokens, so that prefixes are often equal
LENGTH = 30


class Reader:
    """A request that has a slot: its tokens, and how many of them have been read."""

    def __init__(self, lease, prompt, limit):
        self.lease, self.tokens, self.limit = lease, list(prompt), limit
        self.prompt, self.anchor = len(prompt), lease.shared


class Admission(RuleBasedStateMachine):
    """Stands in for the engine and the device: a page is a list of the prefixes whose keys and values lie in it."""

    @initialize(
        windows=st.sampled_from([(0,), (0, 5), (3,), (2, 0, 7)]),
        page=st.integers(1, 4),
        chunk=st.integers(1, 9),
        slots=st.integers(1, 3),
        short=st.floats(0.3, 1),
    )
    def start(self, windows, page, chunk, slots, short):
        self.cfg, self.page, self.chunk, self.count = fakes.config(windows), page, chunk, slots
        most = pages_for(self.cfg.kinds, slots=slots, length=LENGTH, page_size=page, chunk=chunk)
        one = pages_for(self.cfg.kinds, slots=1, length=LENGTH, page_size=page, chunk=chunk)
        pages = [max(a, int(b * short)) for a, b in zip(one, most, strict=True)]  # often too few for all slots
        self.slots = Slots(self.cfg.kinds, slots=slots, length=LENGTH, pages=pages, page_size=page, chunk=chunk)
        self.memory = [[[None] * page for _ in range(count)] for count in pages]
        self.running: list[Reader] = []
        self.unread: list[Reader] = []
        self.gone: list[list[int]] = []

    @rule(prompt=st.lists(TOKEN, min_size=1, max_size=LENGTH - 1), more=st.integers(1, LENGTH))
    def come(self, prompt, more):
        limit = min(len(prompt) + more, LENGTH)
        self.slots.check(limit)
        lease = self.slots.lease(prompt, limit)
        if lease is None:
            need = -(-limit // self.page)
            plenty = all(pool.available >= need for pool in self.slots.pools)
            # nobody waits for ever: not for himself, and for others only while they read their prompts
            assert self.running
            assert len(self.running) == self.count or self.unread or not plenty
            return
        assert lease.slot not in [reader.lease.slot for reader in self.running]
        assert lease.shared < len(prompt)
        assert lease.shared % self.page == 0
        reader = Reader(lease, prompt, limit)
        self.running.append(reader)
        self.unread.append(reader)

    def cell(self, kind, reader, position):
        page = self.memory[kind][reader.lease.tables[kind, position // self.page]]
        return page, position % self.page

    def read(self, reader, count):
        """One program: all its tokens are written, then each looks back as far as its window."""
        start, reader.anchor = reader.anchor, reader.anchor + count
        for kind, window in enumerate(self.cfg.kinds):
            for position in range(start, reader.anchor):
                page, i = self.cell(kind, reader, position)
                page[i] = tuple(reader.tokens[: position + 1])
            for position in range(start, reader.anchor):
                for seen in range(max(0, position + 1 - window) if window else 0, position + 1):
                    page, i = self.cell(kind, reader, seen)
                    assert page[i] == tuple(reader.tokens[: seen + 1])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def go_on(self, data):
        reader = data.draw(st.sampled_from(self.running))
        unread = len(reader.tokens) - reader.anchor
        self.read(reader, data.draw(st.integers(1, min(unread, self.chunk))))
        if reader.anchor == len(reader.tokens):
            if reader in self.unread:
                self.slots.publish(reader.lease, reader.tokens[: reader.anchor])
                self.unread.remove(reader)
            reader.tokens.append(data.draw(TOKEN))
            if len(reader.tokens) == reader.limit:
                self.leave(reader, True)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end_in_prefill(self, data):
        reader = data.draw(st.sampled_from(self.running))
        while reader.anchor < len(reader.tokens):
            self.read(reader, min(len(reader.tokens) - reader.anchor, self.chunk))
        self.leave(reader, True)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), publish=st.booleans())
    def abort(self, data, publish):
        self.leave(data.draw(st.sampled_from(self.running)), publish)

    def leave(self, reader, publish):
        if publish:
            self.slots.publish(reader.lease, reader.tokens[: reader.anchor])
        self.slots.give_back(reader.lease)
        self.running.remove(reader)
        self.gone.append(reader.tokens)
        if reader in self.unread:
            self.unread.remove(reader)

    @precondition(lambda self: self.running or self.gone)
    @rule(data=st.data(), cut=st.integers(0, 2), more=st.integers(1, LENGTH))
    def come_again(self, data, cut, more):
        """Tokens that somebody had or has, and more: prefixes are shared in the middle of everything."""
        tokens = data.draw(st.sampled_from([reader.tokens for reader in self.running] + self.gone))
        tokens = tokens[: max(1, min(len(tokens) - cut, LENGTH - 1))]
        self.come(tokens + data.draw(st.lists(TOKEN, max_size=LENGTH - 1 - len(tokens))), more)

    @invariant()
    def every_page_is_counted_once(self):
        for kind, pool in enumerate(self.slots.pools):
            used = {page for reader in self.running for page in reader.lease.pages[kind]}
            assert pool.available == pool.pages - len(used)


TestAdmission = Admission.TestCase
TestAdmission.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)


def make(windows=(0,), *, slots=2, length=32, page=4, chunk=8, pages=None):
    cfg = fakes.config(windows)
    pages = pages or pages_for(cfg.kinds, slots=slots, length=length, page_size=page, chunk=chunk)
    return Slots(cfg.kinds, slots=slots, length=length, pages=pages, page_size=page, chunk=chunk)


def read_and_leave(slots: Slots, prompt: list[int], limit: int):
    lease = slots.lease(prompt, limit)
    slots.publish(lease, prompt)
    slots.give_back(lease)
    return lease


def test_a_prompt_read_before_is_shared_but_for_its_last_token():
    slots = make()
    prompt = list(range(8))
    assert read_and_leave(slots, prompt, 9).shared == 0
    assert read_and_leave(slots, prompt, 9).shared == 4  # the page of token 7 has to be read again for its logits
    assert read_and_leave(slots, prompt + [9], 12).shared == 8
    assert read_and_leave(slots, prompt[:4] + [5] * 5, 12).shared == 4
    assert (slots.hits, slots.looked_up) == (0 + 1 + 2 + 1, 1 + 1 + 2 + 2)


def test_a_prompt_that_is_being_read_is_waited_for():
    slots = make(slots=3)
    prompt = list(range(9))
    first = slots.lease(prompt, 12)
    assert slots.lease(prompt, 12) is None
    assert slots.lease(prompt[:4] + [7], 12) is None
    other = slots.lease([7] * 9, 12)
    assert other.shared == 0
    slots.publish(first, prompt)
    assert slots.lease(prompt, 12).shared == 8


@pytest.mark.parametrize("read", [0, 3, 4, 7])
def test_an_abort_in_the_middle_of_a_prompt_lets_the_next_one_go_on(read):
    slots = make()
    prompt = list(range(9))
    first = slots.lease(prompt, 12)
    slots.publish(first, prompt[:read])
    slots.give_back(first)
    assert slots.lease(prompt, 12).shared == read // 4 * 4


def test_rings_are_not_offered():
    slots = make((4,), length=64, chunk=4)
    prompt = list(range(20))
    assert read_and_leave(slots, prompt, 21).shared == 0
    assert slots.lease(prompt, 21).shared == 0  # both wrote over their own pages: five, in a ring of three
    short = list(range(9))
    assert read_and_leave(slots, short, 10).shared == 0
    assert slots.lease(short, 10).shared == 8


def test_a_shared_prefix_never_takes_the_pages_that_a_ring_needs():
    """One ring's worth of pages, all known as a prefix of the newcomer: he would wait for himself."""
    slots = make((3,), slots=1, length=40, page=4, chunk=4)
    assert slots.pools[0].pages == ring_pages(3, 4, 4) == 3
    prompt = list(range(30))
    read_and_leave(slots, prompt[:12], 12)
    slots.check(34)
    assert slots.lease(prompt, 34).shared == 0


def test_requests_beyond_all_pages_are_refused_in_one_line():
    slots = make(pages=[5])
    slots.check(20)
    with pytest.raises(UserError, match=r"needs 6 KV pages of 4 tokens, got 5 in all"):
        slots.check(21)


@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize(("window", "chunk"), [(1, 1), (4, 4), (7, 8), (512, 100)])
def test_a_ring_holds_a_window_and_a_chunk_and_hardly_more(window, chunk, page):
    """The oldest token that the first of a chunk sees is still there when the last of the chunk has been written."""
    assert window + chunk - 1 <= ring_pages(window, chunk, page) * page < window + chunk + 2 * page
    assert ring_pages(0, chunk, page) == 0


def test_pages_for_as_many_requests_as_slots():
    cfg = fakes.config((0, 5))
    assert pages_for(cfg.kinds, slots=3, length=30, page_size=4, chunk=4) == (3 * 8, 3 * ring_pages(5, 4, 4))
    assert pages_for(cfg.kinds, slots=3, length=10, page_size=4, chunk=4) == (3 * 3, 3 * 3)
