"""Requests in, tokens out: limits, stops, aborts, sharing, and no compilation once warm."""

import jax
import numpy as np
import pytest

from molora_jax.compilation import counted
from molora_jax.config import UserError
from molora_jax.engine.engine import Engine
from molora_jax.engine.request import EngineConfig, Request
from tests import fakes, naive
from tests.numerics import assert_close

BLOCK = 5
CONFIG = EngineConfig(max_rows=3, max_length=naive.LENGTH, page_size=4, prefill_chunk=16, block=BLOCK)
CFG, PARAMS = fakes.weights("llama_tied", unrolled=True)


@pytest.fixture(scope="module")
def warm() -> Engine:
    engine = Engine(CFG, PARAMS, CONFIG)
    engine.warm_up()
    return engine


@pytest.fixture
def engine(warm) -> Engine:
    """One engine for all: every test must leave it as empty as it found it."""
    yield warm
    assert not warm.busy
    assert warm.step() == []
    assert [pool.available for pool in warm.slots.pools] == [pool.pages for pool in warm.slots.pools]


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, CFG.vocab, length).tolist()


def drain(engine: Engine) -> dict[int, list]:
    """All events until nobody is left, by request."""
    events = {}
    while engine.busy:
        for event in engine.step():
            events.setdefault(event.request, []).append(event)
    return events


def test_events_add_up_and_end_once(engine):
    numbers = [
        engine.submit(Request(prompt=prompt(n), max_new_tokens=m)) for n, m in [(3, 12), (40, 1), (1, 63), (7, 5)]
    ]
    events = drain(engine)
    assert sorted(events) == numbers
    for number, limit in zip(numbers, [12, 1, 63, 5], strict=True):
        assert sum(len(event.tokens) for event in events[number]) == limit
        assert [event.finished for event in events[number]] == [None] * (len(events[number]) - 1) + ["length"]
        assert all(1 <= len(event.tokens) <= BLOCK for event in events[number])


def test_more_requests_than_rows_come_back_in_their_order(engine):
    requests = [Request(prompt=prompt(1 + 5 * i, i), max_new_tokens=13 - i) for i in range(11)]
    events = engine.run(requests)
    assert [len(event.tokens) for event in events] == [13 - i for i in range(11)]
    assert all(event.finished == "length" for event in events)
    assert engine.run([]) == []


@pytest.mark.parametrize("at", [0, 1, 7, 18])
def test_a_stop_token_is_the_last_one_given(engine, at):
    free = engine.run([Request(prompt=prompt(6), max_new_tokens=20)])[0]
    assert (free.finished, len(free.tokens)) == ("length", 20)
    stop = free.tokens[at]
    unused = [token for token in range(CFG.vocab) if token not in free.tokens][:7]
    event = engine.run([Request(prompt=prompt(6), max_new_tokens=20, stops=(*unused, stop))])[0]
    assert event.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert event.finished == "stop"
    assert engine.run([Request(prompt=prompt(6), max_new_tokens=20, stops=tuple(unused))])[0] == type(event)(
        event.request + 1, free.tokens, None, "length"
    )


def test_a_stop_token_in_the_prompt_ends_nothing(engine):
    free = engine.run([Request(prompt=prompt(6), max_new_tokens=4)])[0]
    stop = next(token for token in prompt(6) if token not in free.tokens)
    event = engine.run([Request(prompt=prompt(6), max_new_tokens=4, stops=(stop,))])[0]
    assert event.tokens == free.tokens


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 62, 63])
def test_requests_reach_exactly_the_longest_length(engine, length):
    event = engine.run([Request(prompt=prompt(length), max_new_tokens=CONFIG.max_length - length, logprobs=True)])[0]
    assert len(event.tokens) == CONFIG.max_length - length
    assert_close(
        np.array(event.logprobs), naive.logprobs(CFG, PARAMS, prompt(length), event.tokens), "model", "float32"
    )


def test_logprobs_are_of_the_model_whatever_the_cuts_and_the_neighbours(engine):
    hot = dict(temperature=3.0, top_k=5, top_p=0.9, min_p=0.1)
    requests = [
        Request(prompt=prompt(9), max_new_tokens=12, logprobs=True, seed=4, **hot),
        Request(prompt=prompt(20), max_new_tokens=9),
        Request(prompt=prompt(2), max_new_tokens=17, logprobs=True),
    ]
    events = engine.run(requests)
    assert events[1].logprobs is None
    for request, event in zip(requests, events, strict=True):
        if request.logprobs:
            want = naive.logprobs(CFG, PARAMS, request.prompt, event.tokens)
            assert_close(np.array(event.logprobs), want, "model", "float32")


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_an_aborted_request_says_no_more_and_leaves_nothing_behind(engine, steps):
    """In the queue (0 steps, and the fourth of them later too), in the middle of its prompt, or while it decodes."""
    requests = [Request(prompt=prompt(n, steps), max_new_tokens=14) for n in (40, 3, 35, 30)]
    alone = [event.tokens for event in engine.run(requests)]
    numbers = [engine.submit(request) for request in requests]
    given = {number: [] for number in numbers}
    for _ in range(steps):
        for event in engine.step():
            given[event.request] += event.tokens
    for number in (numbers[0], numbers[3]):
        engine.abort(number)
        engine.abort(number)  # once more changes nothing
    for number, events in drain(engine).items():
        assert number in numbers[1:3]
        given[number] += [token for event in events for token in event.tokens]
    assert [given[number] for number in numbers[1:3]] == alone[1:3]
    engine.abort(10**9)  # nobody
    assert [event.tokens for event in engine.run(requests)] == alone


def test_an_abort_of_all_leaves_an_idle_engine(engine):
    numbers = [engine.submit(Request(prompt=prompt(33, i), max_new_tokens=9)) for i in range(5)]
    engine.step()
    for number in numbers:
        engine.abort(number)
    assert not engine.busy


def test_equal_prefixes_are_read_once(engine):
    first = Request(prompt=prompt(30, 77), max_new_tokens=6)
    more = Request(prompt=prompt(30, 77) + [5, 6, 7], max_new_tokens=6)
    before, read = engine.slots.hits, engine.usage.prefill_tokens
    events = engine.run([first, more, first])  # the others wait for the first one's pages
    assert engine.slots.hits - before == 7 + 7  # pages of four tokens
    assert engine.usage.prefill_tokens - read == 30 + (33 - 28) + (30 - 28)
    assert events[0].tokens == events[2].tokens
    engine.run([Request(prompt=prompt(60, seed), max_new_tokens=4) for seed in range(6)])  # nothing is known any more
    assert engine.run([more])[0].tokens == events[1].tokens
    assert engine.slots.hits - before == 14


def test_a_prefix_is_shared_as_soon_as_it_is_read(engine):
    """Also when the chunks leave one token over, which reads like a decode step."""
    request = Request(prompt=prompt(CONFIG.prefill_chunk + 1, 3), max_new_tokens=40)
    first, second = engine.submit(request), engine.submit(request)
    order = []
    while engine.busy:
        order += [event.request for event in engine.step()]
    assert order.index(second) < len(order) - 1 - order[::-1].index(first)  # it came before the first had ended


def test_answers_are_shared_too(engine):
    """The next turn of a chat finds the pages of the one before, prompt and answer."""
    turn = engine.run([Request(prompt=prompt(11, 5), max_new_tokens=14)])[0]
    before = engine.slots.hits
    engine.run([Request(prompt=prompt(11, 5) + turn.tokens + [1, 2], max_new_tokens=3)])
    assert engine.slots.hits - before == 24 // 4  # the last token given was never read


def test_whoever_waits_gets_the_slot_of_the_first_that_ends(engine):
    for n, tokens in [(3, 20), (4, 20), (5, 2)]:
        engine.submit(Request(prompt=prompt(n), max_new_tokens=tokens))
    waiting = engine.submit(Request(prompt=prompt(6), max_new_tokens=2))
    events = engine.step()
    assert [len(event.tokens) for event in events] == [1, 1, 1]  # all prompts in one program
    events = engine.step()
    assert [len(event.tokens) for event in events] == [1, 1, 1]  # the third ended: no more of the block
    assert events[2].finished == "length"
    assert [event.request for event in engine.step()] == [waiting]
    drain(engine)


def test_prompts_that_fit_one_program_are_read_together():
    config = EngineConfig(max_rows=4, max_length=naive.LENGTH, page_size=4, prefill_chunk=16, block=16)
    engine, reads = Engine(CFG, PARAMS, config), []
    run = engine._run
    engine._run = lambda bucket, slots: (
        (reads.append(len(slots)) if bucket in engine.prefill else None) or run(bucket, slots)
    )
    limits = [3, 6, 9, 12, *(5 + 3 * i % 7 for i in range(9))]  # rows end one after another
    requests = [Request(prompt=prompt(7, i), max_new_tokens=most) for i, most in enumerate(limits)]
    events = engine.run(requests)
    assert len(reads) <= 8  # two for the first four prompts; nine more if each that waits were read by itself
    alone = [engine.run([request])[0].tokens for request in requests]
    assert [event.tokens for event in events] == alone


def test_sampled_tokens_are_those_of_the_seed(engine):
    request = dict(prompt=prompt(5), max_new_tokens=30, temperature=1.5)
    events = engine.run([Request(seed=seed, **request) for seed in (3, 4, 3)])
    assert events[0].tokens == events[2].tokens != events[1].tokens
    assert len({event.tokens[0] for event in engine.run([Request(seed=s, **request) for s in range(12)])}) > 3


def test_usage_counts_what_was_read_and_given(engine):
    usage = engine.usage
    read, given, steps = usage.prefill_tokens, usage.decode_tokens, usage.decode_steps
    engine.run([Request(prompt=prompt(21, 9), max_new_tokens=8), Request(prompt=prompt(22, 8), max_new_tokens=3)])
    assert usage.prefill_tokens - read == 21 + 22
    assert usage.decode_tokens - given == 7 + 2  # the first of each came out of its prompt
    assert usage.decode_steps - steps == 7


def test_nothing_is_compiled_or_traced_once_warm(engine):
    with counted() as count:
        requests = [
            Request(prompt=prompt(n, n), max_new_tokens=m, temperature=t, logprobs=bool(n % 2), stops=(n,), top_p=p)
            for n, m, t, p in [(1, 9, 0, 1), (30, 3, 1, 0.5), (16, 20, 0.1, 1), (17, 1, 0, 1), (2, 30, 2, 0.9)]
        ]
        engine.run(requests)
        number = engine.submit(requests[1])
        engine.step()
        engine.abort(number)
        engine.run(requests[:1])
    assert count.programs == 0


def test_counted_does_count():
    with counted() as count:
        jax.jit(lambda x: x * 3 + 1)(np.arange(7.0))
    assert count.programs == 1


def test_a_refused_or_interrupted_batch_leaves_nothing_behind(engine, monkeypatch):
    good, bad = Request(prompt=[1, 2], max_new_tokens=5), Request(prompt=[1] * 60, max_new_tokens=5)
    with pytest.raises(UserError, match="got 60 tokens"):
        engine.run([good, bad])
    assert not engine.busy
    step, steps = engine.step, iter(range(1))
    monkeypatch.setattr(engine, "step", lambda: step() if next(steps, None) is not None else interrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.run([good, good])
    monkeypatch.undo()
    assert not engine.busy
    assert len(engine.run([good])[0].tokens) == 5


def interrupt():
    raise KeyboardInterrupt


def test_requests_are_checked_before_they_queue(engine):
    with pytest.raises(UserError, match="got 60 tokens and 5 to generate"):
        engine.submit(Request(prompt=[1] * 60, max_new_tokens=5))
    assert not engine.busy


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (dict(max_rows=0), "batch_size: got 0, expected at least 1"),
        (dict(prefill_chunk=0), "prefill_chunk: got 0, expected at least 1"),
        (dict(page_size=0), "page_size: got 0, expected at least 1"),
        (dict(block=-1), "block: got -1, expected at least 1"),
        (dict(pages=(9, 9, 9)), "pages: got 3, expected 1, one for each kind of layer"),
    ],
)
def test_impossible_sizes_are_refused_in_one_line(fields, line):
    with pytest.raises(UserError, match=line):
        Engine(CFG, PARAMS, EngineConfig(**fields))
