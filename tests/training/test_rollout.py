"""Rollouts by the engine: whose they are, that they repeat, their log-probabilities against a whole forward pass."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from molora_jax.adapters.adapter import merge
from molora_jax.adapters.library import Library
from molora_jax.adapters.route import NONE
from molora_jax.adapters.router import new_router
from molora_jax.adapters.spec import BankSpec
from molora_jax.compilation import counted
from molora_jax.config import UserError
from molora_jax.engine.engine import Engine
from molora_jax.engine.experts import Experts
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.models import transformer
from molora_jax.nn.layout import dense
from molora_jax.training import policy_loss, specialist
from molora_jax.training.algorithms import ALGORITHMS
from molora_jax.training.experience import experience, replayed
from molora_jax.training.rollout import chosen, rollouts
from tests import experts, fakes
from tests.numerics import assert_close

CONFIG = EngineConfig(max_rows=9, max_length=32, page_size=4, prefill_chunk=16, block=32)
CFG, STACKED = fakes.model("llama_tied")
PARAMS = transformer.unstack(dict(STACKED))
PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 10, 11, 12], [3]]
STOPS = tuple(range(0, CFG.vocab, 13))
HOW = dict(per_prompt=3, max_new_tokens=9, stops=STOPS, seed=4)


def adapter(seed: int):
    return experts.adapter(CFG, STACKED, "plain", seed, name="x")


@pytest.fixture(scope="module")
def library():
    library = Library(BankSpec.holding([adapter(0)]), PARAMS)
    library.add(adapter(0))
    return library


@pytest.fixture(scope="module")
def engine(library):
    return Engine(CFG, PARAMS, CONFIG, Experts(library, CFG.vocab))


@functools.partial(jax.jit, static_argnums=0)
def forward(cfg, params, tokens, **how):
    out = transformer.apply(cfg, params, tokens, dense(1, len(tokens)), **how)
    return transformer.logits(cfg, params, out.hidden)


def scores(tokens: list[int], cfg=CFG, params=PARAMS, **how) -> np.ndarray:
    """Of all positions, in one pass; all passes have the same length."""
    padded = np.array(tokens + [0] * (CONFIG.max_length - len(tokens)))
    return np.asarray(forward(cfg, params, padded, **how), np.float64)[: len(tokens)]


@functools.cache
def merged(seed: int):
    return merge(CFG, STACKED, adapter(seed))


def logprobs(rollout, scores: np.ndarray, temperature: float = 1.0) -> list[float]:
    """Of the sampled tokens, in fp64 numpy."""
    found = scores[len(rollout.prompt) - 1 : -1] / temperature
    found -= found.max(-1, keepdims=True)
    found -= np.log(np.exp(found).sum(-1, keepdims=True))
    return [row[token] for row, token in zip(found, rollout.tokens, strict=True)]


def whole(found, temperature: float = 1.0, own: tuple = ()) -> np.ndarray:
    """The log-probabilities of all tokens of some rollouts."""
    return np.concatenate([logprobs(r, scores(r.prompt + r.tokens, *own), temperature) for r in found])


def given(found) -> np.ndarray:
    return np.concatenate([r.logprobs for r in found]).astype(np.float32)


@pytest.mark.parametrize(("name", "temperature"), [("x", 1.0), ("x", 0.6), (None, 1.7)])
def test_log_probabilities_are_those_of_the_distribution_that_was_drawn_from(engine, name, temperature):
    found = rollouts(engine, PROMPTS, temperature=temperature, adapter=name, **HOW)
    own = merged(0) if name else ()
    assert_close(given(found), whole(found, temperature, own), "model")
    assert np.abs(given(found) - whole(found, 1.1, own)).max() > 1e-2


def test_each_prompt_has_its_own_in_order_and_they_end_where_they_should(engine):
    found = rollouts(engine, PROMPTS, adapter="x", temperature=2.0, **HOW)
    assert [r.prompt for r in found] == [prompt for prompt in PROMPTS for _ in range(3)]
    assert len({tuple(r.tokens) for r in found}) == len(found)  # each has a seed of its own
    for rollout in found:
        ends = [token in STOPS for token in rollout.tokens]
        assert not any(ends[:-1])
        assert rollout.finished == ends[-1]
        assert rollout.finished or len(rollout.tokens) == 9
        assert len(rollout.logprobs) == len(rollout.tokens)
    assert {r.finished for r in found} == {True, False}
    room = rollouts(engine, [[1] * 30], adapter="x", **HOW)
    assert {len(r.tokens) for r in room} <= {1, 2}  # what is left of the engine's length


def test_they_repeat_whatever_the_engine_has_done_and_differ_by_seed(engine):
    first = rollouts(engine, PROMPTS, adapter="x", **HOW)
    engine.run([Request(prompt=PROMPTS[1][:5], adapter="x", max_new_tokens=3)])  # pages that they could share
    assert rollouts(engine, PROMPTS, adapter="x", **HOW) == first
    assert rollouts(engine, PROMPTS, adapter="x", **(HOW | dict(seed=5))) != first


def test_a_new_version_of_the_adapter_is_sampled_without_a_compilation(engine, library):
    first = rollouts(engine, PROMPTS, adapter="x", **HOW)
    library.add(adapter(1))
    with counted() as count:
        found = rollouts(engine, PROMPTS, adapter="x", **HOW)
    assert count.programs == 0
    assert_close(given(found), whole(found, 1.0, merged(1)), "model")
    library.add(adapter(0))
    assert rollouts(engine, PROMPTS, adapter="x", **HOW) == first


def test_what_a_router_chose_is_recorded_and_replays():
    names = ("p", "q")
    two = [dataclasses.replace(experts.adapter(CFG, STACKED, "plain", i), name=name) for i, name in enumerate(names)]
    library = Library.holding(two, PARAMS)
    router = new_router(CFG.width, len(names), seed=3)
    config = dataclasses.replace(CONFIG, trace=True)
    engine = Engine(CFG, PARAMS, config, Experts(library, CFG.vocab, router=router))
    found = rollouts(engine, PROMPTS, **HOW)
    used = set()
    for rollout in found:
        ids = chosen(rollout, library.resident)
        assert ids.shape == (len(rollout.prompt) + len(rollout.tokens), CFG.layers)
        assert (ids[-1] == NONE).all()
        used |= set(ids[:-1].reshape(-1).tolist())
    assert used == {0, 1}
    ids = [chosen(rollout, library.resident) for rollout in found]
    how = dict(length=config.max_length, most=HOW["max_new_tokens"], choices=ids)
    batch = experience(ALGORITHMS["grpo"], found, np.zeros(len(found)), **how)
    decode = specialist.decoder(CFG, route=replayed)
    bank = Library.holding(two, STACKED).bank
    score = jax.jit(functools.partial(policy_loss.logprobs, CFG, decode))
    got = score({"params": STACKED, "bank": bank}, batch)
    assert_close(np.asarray(got), batch.logprobs, "model")


def test_what_cannot_be_is_refused(engine, library):
    with pytest.raises(UserError, match="got a prompt of 32 tokens, expected fewer than the engine's 32"):
        rollouts(engine, [[1] * 32], **HOW)
    with pytest.raises(UserError, match="got 0 prompts, 3 each, expected at least one of one"):
        rollouts(engine, [], **HOW)
    with pytest.raises(UserError, match="adapter: got 'y'"):
        rollouts(engine, PROMPTS, adapter="y", **HOW)
    with pytest.raises(UserError, match="expected an engine with trace=True"):
        chosen(rollouts(engine, PROMPTS, **HOW)[0], {})
    engine.submit(Request(prompt=[1], max_new_tokens=1))
    with pytest.raises(UserError, match="got requests at work"):
        rollouts(engine, PROMPTS, **HOW)
    engine.step()
