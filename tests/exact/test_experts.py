"""In float64 every request of an engine with experts gets the tokens of its own naive loop, whoever runs beside it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters import adapter as adapters
from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.library import Library
from molora_jax.adapters.mixtures.xlora import xlora
from molora_jax.adapters.route import NONE, Route
from molora_jax.adapters.router import new_router
from molora_jax.adapters.spec import BankSpec
from molora_jax.compilation import counted
from molora_jax.config import UserError
from molora_jax.engine.engine import Engine
from molora_jax.engine.experts import Experts
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.models import transformer
from molora_jax.nn.layout import dense
from tests import experts, fakes, naive

NAME = "llama_untied"
KINDS = ("plain", "rslora", "dora", "ends", "whole")
RULE = dict.fromkeys(range(30, 60), "plain") | dict.fromkeys(range(60, 80), "dora") | {5: None}


@functools.cache
def model(unrolled: bool = False):
    return fakes.weights(NAME, jnp.float64, unrolled=unrolled)


@functools.cache
def expert(kind: str):
    return experts.adapter(*fakes.model(NAME, jnp.float64), kind, KINDS.index(kind))


def library(slots: int, params) -> Library:
    every = [expert(kind) for kind in KINDS]
    made = Library(BankSpec.holding(every, slots=slots, dtype=jnp.float64), params)
    for adapter in every:
        made.add(adapter)
    return made


def engine(*, rule=None, trace: bool = False) -> Engine:
    """Three slots for more experts."""
    cfg, params = model(unrolled=True)
    sizes = dict(max_rows=3, max_length=naive.LENGTH, page_size=3, prefill_chunk=7, block=5)
    experts = Experts(library(3, params), cfg.vocab, rule=rule)
    return Engine(cfg, params, EngineConfig(**sizes, trace=trace), experts)


@pytest.fixture(scope="module")
def shared() -> Engine:
    return engine()


@pytest.fixture(scope="module")
def ruled() -> Engine:
    return engine(rule=RULE, trace=True)


@functools.cache
def merged(kind: str | None):
    cfg, params = fakes.model(NAME, jnp.float64)
    return (cfg, params) if kind is None else adapters.merge(cfg, params, expert(kind))


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 97, length).tolist())


@functools.cache
def every_expert() -> Library:
    lib = library(len(KINDS), model()[1])
    lib.slots(KINDS)
    return lib


@functools.partial(jax.jit, static_argnums=0)
def _scores(cfg, params, bank, tokens, ids, length):
    layout = dense(1, naive.LENGTH, valid=(np.arange(naive.LENGTH) < length)[None])
    hidden = transformer.apply(cfg, params, tokens, layout, bank=bank, route=Route.of(ids)).hidden
    return transformer.logits(cfg, params, hidden[length - 1][None], bank=bank, ids=ids[length - 1][None])[0]


def recompute(request: Request, choose) -> list[int]:
    """Greedy tokens, everything read anew each time; `choose(tokens)` names the expert of each token."""
    cfg, params = model()
    lib, tokens = every_expert(), list(request.prompt)
    while len(tokens) < len(request.prompt) + request.max_new_tokens:
        padded, ids = np.zeros(naive.LENGTH, np.int32), np.full(naive.LENGTH, NONE, np.int32)
        padded[: len(tokens)] = tokens
        ids[: len(tokens)] = [NONE if name is None else lib.resident[name] for name in choose(tokens)]
        tokens.append(int(np.argmax(_scores(cfg, params, lib.bank, padded, ids, np.int32(len(tokens))))))
    return tokens[len(request.prompt) :]


def test_each_row_is_its_own_merged_model_alone(shared):
    """More experts than slots, and pages that a prompt shares with the same expert's only."""
    names = [*KINDS, None, "plain", "dora", "rslora", None]
    requests = [
        Request(prompt=prompt(1, 13) if i % 2 else prompt(i, 9), max_new_tokens=12, adapter=name)
        for i, name in enumerate(names)
    ]
    for event, request in zip(shared.run(requests), requests, strict=True):
        assert event.tokens == naive.generate(*merged(request.adapter), request)[0], request.adapter
    assert len({tuple(event.tokens) for event in shared.run(requests[1::2])}) > 3  # the experts do differ
    assert not any(held and held.users for held in shared.experts.library._resident.values())


def test_each_token_has_the_expert_that_is_asked_for(shared):
    rng = np.random.default_rng(2)
    routes = [tuple(rng.choice(np.array(["plain", "dora", "ends", None], object), n)) for n in (3, 11, 20, 16)]
    requests = [Request(prompt=prompt(i, 11), max_new_tokens=9, route=route) for i, route in enumerate(routes)]
    for event, request in zip(shared.run(requests), requests, strict=True):
        choose = lambda tokens, r=request.route: [r[min(i, len(r) - 1)] for i in range(len(tokens))]
        assert event.tokens == recompute(request, choose)


def test_a_rule_gives_tokens_their_experts(ruled):
    """Some ids call for an expert, as a vocabulary's ranges or control tokens do; the others keep the last one's."""
    requests = [Request(prompt=prompt(i, 6 + i), max_new_tokens=15) for i in range(5)]
    requests.append(Request(prompt=prompt(7, 4), max_new_tokens=15, adapter="whole"))

    def choose(tokens, last):
        names = []
        for token in tokens:
            last = RULE.get(token, last)
            names.append(last)
        return names

    for event, request in zip(ruled.run(requests), requests, strict=True):
        mine = functools.partial(choose, last=request.adapter)
        assert event.tokens == recompute(request, mine)
        read = list(request.prompt) + event.tokens[:-1]
        assert event.trace == [[name] * ruled.cfg.layers for name in mine(read)]


def test_a_trace_replayed_gives_the_same_tokens(ruled, shared):
    request = Request(prompt=prompt(3, 8), max_new_tokens=20)
    first = ruled.run([request])[0]
    route = tuple(names[0] for names in first.trace)
    assert len(set(route)) > 1
    again = Request(prompt=request.prompt, max_new_tokens=20, route=route)
    assert shared.run([again])[0].tokens == first.tokens


def test_a_new_version_of_an_expert_while_others_run_changes_nothing_for_them(shared):
    version = lambda seed: fresh(
        *fakes.model(NAME, jnp.float64), "new", rank=2, sites=("mlp.up_proj",), seed=seed, spread=0.5
    )
    shared.warm_up()
    requests = [Request(prompt=prompt(i, 8), max_new_tokens=20, adapter=("plain", "new")[i]) for i in range(2)]
    tokens = {}
    with counted() as count:
        shared.experts.library.add(version(8))
        numbers = [shared.submit(request) for request in requests]
        tokens = {number: [] for number in numbers}
        for step in itertools.count():
            if step == 4:
                shared.experts.library.add(version(9))
                numbers.append(shared.submit(requests[1]))
                tokens[numbers[-1]] = []
            for event in shared.step():
                tokens[event.request] += event.tokens
            if step > 4 and not shared.busy:
                break
    assert count.programs == 0
    models = merged("plain"), *(adapters.merge(*fakes.model(NAME, jnp.float64), version(seed)) for seed in (8, 9))
    for number, alone, request in zip(numbers, models, (*requests, requests[1]), strict=True):
        assert tokens[number] == naive.generate(*alone, request)[0]
    assert tokens[numbers[1]] != tokens[numbers[2]]


def test_an_expert_that_is_not_there_is_refused_at_once(shared):
    with pytest.raises(UserError, match="adapter: got 'plane', expected one of 'plain', 'rslora'"):
        shared.submit(Request(prompt=(1,), max_new_tokens=1, adapter="plane"))
    with pytest.raises(UserError, match="got 'none', expected one of"):
        shared.submit(Request(prompt=(1,), max_new_tokens=1, route=("plain", "none")))
    bare = Engine(*model(), EngineConfig(max_rows=1, max_length=16, page_size=4, prefill_chunk=4, block=1))  # no bank
    with pytest.raises(UserError, match="expected none: this engine has no bank"):
        bare.submit(Request(prompt=(1,), max_new_tokens=1, adapter="plain"))


def test_a_rule_beyond_the_vocabulary_is_refused():
    cfg, params = model()
    with pytest.raises(UserError, match="rule: got token id 97 for 'plain', expected 0 to 96"):
        Experts(library(1, params), cfg.vocab, rule={97: "plain"})


def decided(request: Request, route) -> list[int]:
    """Greedy tokens, everything read anew; `route(cfg, params, tokens, layout)` decides for a whole padded row."""
    cfg, params = model()
    bank, tokens = routed_library().bank, list(request.prompt)

    @jax.jit
    def scores(params, bank, padded, length):
        layout = dense(1, naive.LENGTH, valid=(jnp.arange(naive.LENGTH) < length)[None])
        how = dict(bank=bank, route=route(cfg, params, padded, layout))
        hidden = transformer.apply(cfg, params, padded, layout, **how).hidden
        return transformer.logits(cfg, params, hidden[length - 1][None])[0]

    while len(tokens) < len(request.prompt) + request.max_new_tokens:
        padded = np.zeros(naive.LENGTH, np.int32)
        padded[: len(tokens)] = tokens
        tokens.append(int(np.argmax(scores(params, bank, padded, np.int32(len(tokens))))))
    return tokens[len(request.prompt) :]


@functools.cache
def routed_library() -> Library:
    """Experts of the layers alone, which a router may choose from."""
    every = [expert("plain"), expert("rslora")]
    made = Library(BankSpec.holding(every, slots=3, dtype=jnp.float64), model()[1])
    for adapter in every:
        made.add(adapter)
    return made


@pytest.mark.parametrize("kind", ["hard", "xlora"])
def test_a_router_decides_for_every_token_as_without_a_cache(kind):
    """In chunks and step by step; X-LoRA reads the base's hidden states, which have a cache of their own."""
    cfg, params = model()
    lib = routed_library()
    names = ("rslora", "plain")
    slots = lib.slots(names)
    if kind == "hard":
        router = new_router(cfg.width, 2, dtype=jnp.float64).placed(slots, 3)
        route = lambda *_: Route(router=router)
    else:
        router = xlora(cfg.width, 2, cfg.layers, temperature=0.1).placed(slots, 3)
        route = lambda cfg, params, tokens, layout: router.route(transformer.apply(cfg, params, tokens, layout).hidden)
    sizes = dict(max_rows=2, max_length=naive.LENGTH, page_size=3, prefill_chunk=7, block=5, trace=True)
    engine = Engine(cfg, params, EngineConfig(**sizes), Experts(lib, cfg.vocab, router=router))
    requests = [Request(prompt=prompt(i, 5 + 4 * i), max_new_tokens=12) for i in range(3)]
    requests.append(Request(prompt=prompt(8, 4), max_new_tokens=8, adapter="plain"))
    events = engine.run(requests)
    for event, request in zip(events[:3], requests, strict=False):
        assert event.tokens == decided(request, route)
        assert len(event.trace) == len(request.prompt) + 11
    assert {name for event in events[:3] for names in event.trace for name in names} == set(names)
    assert events[3].tokens == naive.generate(*merged("plain"), requests[3])[0]
