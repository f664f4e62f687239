"""In float64 the engine gives, token for token, what recomputing every prefix from nothing gives."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.engine.engine import Engine
from molora_jax.engine.request import EngineConfig, Request
from tests import fakes, naive

CONFIGS = {
    "alone": (True, dict(max_rows=1, page_size=16, prefill_chunk=64, block=1)),
    "odd": (False, dict(max_rows=3, page_size=3, prefill_chunk=7, block=5)),  # rings wrap
    "crowd": (True, dict(max_rows=8, page_size=4, prefill_chunk=9, block=64)),  # here too
    "token": (False, dict(max_rows=2, page_size=1, prefill_chunk=1, block=2)),
    "few": (True, dict(max_rows=3, page_size=4, prefill_chunk=9, block=5, pages=(16, 8))),  # hardly more than one needs
}
CASES = [
    ("llama_untied", "alone"),
    ("llama_untied", "odd"),
    ("llama_untied", "token"),
    ("mistral_window", "odd"),
    ("mistral_window", "crowd"),
    ("gemma3", "odd"),
    ("gemma3", "crowd"),
    ("gemma3", "few"),
]


@functools.cache
def load(name: str, unrolled: bool):
    return fakes.weights(name, jnp.float64, unrolled=unrolled)


@functools.cache
def want(name: str, request: Request) -> tuple[list[int], str]:
    return naive.generate(*load(name, False), request)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request) -> tuple[str, Engine]:
    name, config = request.param
    unrolled, sizes = CONFIGS[config]
    return name, Engine(*load(name, unrolled), EngineConfig(max_length=naive.LENGTH, **sizes))


def draw(seed: int, count: int, vocab: int = 97) -> list[Request]:
    """Requests of every kind: greedy, sampled, cut in all ways, with stops, up to the longest length."""
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(count):
        length = int(rng.choice([1, 2, rng.integers(1, 40), 40]))
        cuts = {} if i % 2 else dict(temperature=float(rng.choice([0.7, 4.0])), seed=int(rng.integers(2**32)))
        if cuts and i % 4:
            cuts |= dict(
                top_k=int(rng.integers(1, 30)), top_p=float(rng.uniform(0.5, 1)), min_p=float(rng.uniform(0, 0.1))
            )
        requests.append(
            Request(
                prompt=tuple(rng.integers(0, vocab, length).tolist()),
                max_new_tokens=int(rng.choice([1, 2, 17, naive.LENGTH - length])),
                stops=tuple(rng.integers(0, vocab, int(rng.integers(0, 5))).tolist()),
                **cuts,
            )
        )
    return requests


def test_tokens_are_those_of_the_naive_loop_in_any_order(case):
    name, engine = case
    requests = draw(1, 10)
    for order in (np.arange(10), np.random.default_rng(0).permutation(10)):
        events = engine.run([requests[i] for i in order])
        for i, event in zip(order, events, strict=True):
            assert (event.tokens, event.finished) == want(name, requests[i])


def test_a_request_alone_gets_what_it_gets_among_others(case):
    name, engine = case
    for request in draw(1, 10)[:3]:
        assert engine.run([request])[0].tokens == want(name, request)[0]


@pytest.mark.parametrize("seed", [2, 3])
def test_aborts_change_nothing_for_the_others(case, seed):
    """Any request may go at any time: waiting, in its prompt, in its answer; its pages are others' at once."""
    name, engine = case
    rng = np.random.default_rng(seed)
    requests = draw(1, 10) + draw(4, 10)
    alive = {engine.submit(request): request for request in requests}
    given = {number: [] for number in alive}
    while engine.busy:
        if len(given) > 12 and rng.random() < 0.4:
            number = int(rng.choice(list(given)))
            engine.abort(number)
            del given[number], alive[number]
        for event in engine.step():
            given[event.request] += event.tokens
    assert len(alive) >= 12
    for number, request in alive.items():
        assert given[number] == want(name, request)[0]


def test_shared_prefixes_change_nothing(case):
    """Prompts that begin like others, running or gone, also while those are being read or aborted."""
    name, engine = case
    rng = np.random.default_rng(5)
    root = draw(6, 1)[0].prompt + tuple(rng.integers(0, 97, 20).tolist())
    tails = [(1,), (1, 2, 3, 4), (), (1, 2, 3, 4, 5, 6, 7, 8), (9,), (1, 2, 3)]
    cuts = [19, 20, 8, 20, 12, 17]
    requests = [Request(prompt=root[:cut] + tail, max_new_tokens=4) for cut, tail in zip(cuts, tails, strict=True)]
    requests += [dataclasses.replace(request, temperature=2.0, seed=i) for i, request in enumerate(requests)]
    before = engine.slots.hits
    first = engine.submit(Request(prompt=root, max_new_tokens=2))
    engine.step()
    engine.abort(first)  # whoever waited for its pages goes on without
    for event, request in zip(engine.run(requests), requests, strict=True):
        assert event.tokens == want(name, request)[0]
    if name == "llama_untied" and engine.config.page_size < 16:
        assert engine.slots.hits > before
