"""In float64 a gated expert gives with the cache what it gives without: its state outlives every program."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.gate import GateConfig
from molora_jax.adapters.library import Library
from molora_jax.adapters.route import NONE, Route
from molora_jax.adapters.spec import BankSpec
from molora_jax.engine.engine import Engine
from molora_jax.engine.experts import Experts
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.models import state as states
from molora_jax.models import transformer
from molora_jax.nn.layout import dense, ragged
from tests import fakes, naive

NAME = "llama_untied"
CONFIG = GateConfig(start="published", states=2, output="diagonal")


@functools.cache
def model(unrolled: bool = False):
    return fakes.weights(NAME, jnp.float64, unrolled=unrolled)


def loud(core):
    """A gate whose scales matter: at its start they hardly differ from one."""
    return core | {
        "out": jax.tree.map(lambda leaf: leaf * 30, core["out"]),
        "proj": jax.tree.map(lambda v: v * 5, core["proj"]),
    }


@functools.cache
def library(unrolled: bool) -> Library:
    """Two gated experts and a plain one of a higher rank."""
    base = model()
    sites = ("attn.q_proj", "attn.v_proj", "mlp.up_proj", "mlp.down_proj")
    lib = []
    for seed, name in enumerate(("one", "two")):
        made = fresh(*base, name, rank=2, sites=sites, seed=seed, spread=0.5, gate=CONFIG, share="input")
        groups = tuple(dataclasses.replace(g, cores=tuple(map(loud, g.cores))) for g in made.gates)
        lib.append(dataclasses.replace(made, gates=groups))
    lib.append(fresh(*base, "plain", rank=3, sites=sites, seed=7, spread=0.3))
    made = Library(BankSpec.holding(lib, dtype=jnp.float64), model(unrolled)[1])
    for adapter in lib:
        made.add(adapter)
    made.slots(("one", "two", "plain"))
    return made


@functools.partial(jax.jit, static_argnums=0)
def _run(cfg, params, bank, tokens, ids, length):
    layout = dense(1, naive.LENGTH, valid=(np.arange(naive.LENGTH) < length)[None])
    hidden = transformer.apply(cfg, params, tokens, layout, bank=bank, route=Route.of(ids)).hidden
    return hidden, transformer.logits(cfg, params, hidden[length - 1][None])[0]


def whole(tokens, names):
    """Hidden states of `tokens`, and scores of the next one, from nothing."""
    cfg, params = model()
    lib = library(False)
    padded, ids = np.zeros(naive.LENGTH, np.int32), np.full(naive.LENGTH, NONE, np.int32)
    padded[: len(tokens)] = tokens
    ids[: len(tokens)] = [NONE if name is None else lib.resident[name] for name in names]
    hidden, scores = _run(cfg, params, lib.bank, padded, ids, np.int32(len(tokens)))
    return np.asarray(hidden[: len(tokens)]), np.asarray(scores)


def recompute(request: Request) -> list[int]:
    tokens, route = list(request.prompt), request.route or (request.adapter,)
    while len(tokens) < len(request.prompt) + request.max_new_tokens:
        _, scores = whole(tokens, [route[min(i, len(route) - 1)] for i in range(len(tokens))])
        tokens.append(int(np.argmax(scores)))
    return tokens[len(request.prompt) :]


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 97, length).tolist())


def test_generation_with_the_cache_is_generation_without_it():
    """Rows split into chunks, side by side, in used slots, with a route that leaves an expert and comes back."""
    cfg, params = model(unrolled=True)
    sizes = dict(max_rows=3, max_length=naive.LENGTH, page_size=4, prefill_chunk=5, block=6)
    engine = Engine(cfg, params, EngineConfig(**sizes), Experts(library(True), cfg.vocab))
    route = ("one", "two", "two", None, "plain", "one") * 4
    requests = [
        Request(prompt=prompt(i, 3 + 4 * i), max_new_tokens=14, adapter=name)
        for i, name in enumerate(("one", "two", "plain", "one"))
    ]
    requests += [Request(prompt=prompt(9, 11), max_new_tokens=14, route=route)]
    requests += [requests[0], Request(prompt=requests[0].prompt + (1, 2), max_new_tokens=5, adapter="one")]
    for event, request in zip(engine.run(requests), requests, strict=True):
        assert event.tokens == recompute(request)
    _, gated = whole(prompt(3, 9), ["one"] * 9)
    core = jax.tree.leaves(engine._memories[0].state.gates)
    assert all(np.isfinite(leaf).all() for leaf in core)
    assert np.abs(gated - whole(prompt(3, 9), ["plain"] * 9)[1]).max() > 1e-2


@functools.partial(jax.jit, static_argnums=(0, 5))
def _extend(cfg, params, bank, state, tokens, count, starts, slots, ids):
    table = jnp.arange(32, dtype=jnp.int32).reshape(1, 2, 16)[:, slots]
    layout = ragged(
        starts,
        jnp.full(len(slots), count, jnp.int32),
        table,
        tokens=len(tokens),
        tile=1 if count == 1 else 2,
        page_size=4,
        slots=slots,
    )
    out = transformer.apply(cfg, params, tokens, layout, state, bank=bank, route=Route.of(ids))
    return out.hidden, out.state


def test_any_split_any_slot_and_a_rollback_give_the_whole_rows_states():
    cfg, params = model()
    lib, total = library(False), 9
    rows = np.array([prompt(1, total), prompt(2, total)])
    names = np.array([["one", "two", "plain"] * 3, ["two", "two", "one"] * 3])
    ids = np.vectorize(lib.resident.get)(names)
    want = np.stack([whole(rows[b], names[b])[0] for b in range(2)])
    run = lambda state, begin, end, slots, order: _extend(
        cfg,
        params,
        lib.bank,
        state,
        jnp.asarray(rows[order, begin:end].reshape(-1)),
        end - begin,
        jnp.full(2, begin, jnp.int32),
        jnp.asarray(slots, jnp.int32),
        jnp.asarray(ids[order, begin:end].reshape(-1)),
    )
    for first in (1, 6):
        state = states.new_state(cfg, pages=(32,), page_size=4, dtype=jnp.float64, bank=lib.bank, slots=2)
        _, state = run(state, 0, first, [1, 0], [0, 1])
        for at in range(first, total):
            saved = states.snapshot(state, jnp.arange(2))
            _, spoiled = run(state, at, at + 1, [0, 1], [0, 1])  # the rows in each other's slots
            state = states.restore(spoiled, jnp.arange(2), saved)
            order = [0, 1] if at % 2 else [1, 0]
            hidden, state = run(state, at, at + 1, [1 - b for b in order], order)
            np.testing.assert_allclose(hidden, want[order, at], rtol=1e-9, atol=1e-11)


def test_a_copied_state_goes_on_as_the_one_it_was_copied_from():
    cfg, params = model()
    lib = library(False)
    state = states.new_state(cfg, pages=(32,), page_size=4, dtype=jnp.float64, bank=lib.bank, slots=2)
    tokens = jnp.asarray(prompt(4, 6) + prompt(5, 6))
    _, state = _extend(
        cfg,
        params,
        lib.bank,
        state,
        tokens,
        6,
        jnp.zeros(2, jnp.int32),
        jnp.arange(2, dtype=jnp.int32),
        jnp.zeros(12, jnp.int32),
    )
    beams = states.restore(state, jnp.arange(2), states.snapshot(state, jnp.array([1, 1])))
    for before, after in zip(jax.tree.leaves(state.gates), jax.tree.leaves(beams.gates), strict=True):
        np.testing.assert_array_equal(after, before[:, [1, 1]])
        assert (np.asarray(before[:, 0]) != np.asarray(before[:, 1])).any()
