"""Programs that decide token by token, against loops written by hand for each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.routing import heads
from molora_jax.routing.heads import HeadConfig
from molora_jax.routing.program import ROUTE_DRAW
from molora_jax.routing.programs.bernoulli import Bernoulli
from molora_jax.routing.programs.citer import CITER
from molora_jax.routing.programs.co_llm import CoLLM
from molora_jax.routing.programs.critical_tokens import CriticalTokens
from molora_jax.routing.programs.deferral import Deferral
from molora_jax.routing.programs.model_ensemble import ModelEnsemble
from molora_jax.routing.programs.r2r import R2R
from molora_jax.routing.programs.r_stitch import RStitch
from molora_jax.routing.programs.replay import Replay
from molora_jax.routing.programs.single import Single
from tests.routing.naive_route import Sampler, generate
from tests.routing.numpy_heads import mlp, r2r, sigmoid, softmax
from tests.routing.small_models import VOCAB, WIDTH, decoder

MODELS = [decoder(0), decoder(1), decoder(2)]
PROMPTS = [[3], [5, 1, 4, 1], [2, 7, 1, 8, 2, 8]]
SAMPLERS = [Sampler(), Sampler(temperature=1.0, seed=7)]
LIMIT, STOPS, TAU = 40, (11,), 0.4
cases = pytest.mark.parametrize(("prompt", "sampler"), [(p, s) for p in PROMPTS for s in SAMPLERS])


def step(model: int, tokens: list[int]):
    logits, hidden = MODELS[model](tokens, [-1] * len(tokens))
    return logits[-1].astype(np.float64), hidden[-1].astype(np.float64)


def defer(prompt, sampler, wants, budget: int = 1, small: int = 0, large: int = 1):
    """The small model proposes; where `wants(logits, hidden, token)`, the large one writes `budget` tokens instead."""
    tokens, writers = list(prompt), []
    over = lambda: len(tokens) >= LIMIT or (bool(writers) and tokens[-1] in STOPS)
    while not over():
        logits, hidden = step(small, tokens)
        token = sampler.token(logits, len(tokens), small)
        if not wants(logits, hidden, token):
            tokens.append(token)
            writers.append(small)
            continue
        for _ in range(budget):
            tokens.append(sampler.token(step(large, tokens)[0], len(tokens), large))
            writers.append(large)
            if over():
                break
    return tokens[len(prompt) :], writers


def assert_same(program, prompt, sampler, want, *, params=None, knobs=None, models=2):
    got = generate(
        program, MODELS[:models], prompt, params=params, knobs=knobs, limit=LIMIT, stops=STOPS, sampler=sampler
    )
    assert (got.tokens, got.writers) == want
    return got


def both_write(wants: list, runs) -> None:
    """The threshold of a test must route some tokens and keep others, over all its cases."""
    assert {writer for _, writers in runs for writer in writers} == set(wants)


def entropy(logits):
    mass = softmax(logits)
    return -np.sum(mass * np.log(mass))


DEFERRALS = {
    "entropy": (1.7, lambda logits, *_: entropy(logits) > 1.7),
    "max_prob": (0.4, lambda logits, *_: softmax(logits).max() < 0.4),
    "margin": (0.2, lambda logits, *_: -np.diff(np.sort(softmax(logits))[-2:])[0] > -0.2),
}


@pytest.mark.parametrize("by", DEFERRALS)
@pytest.mark.parametrize("budget", [1, 3])
def test_deferral(by, budget):
    threshold, wants = DEFERRALS[by]
    runs = []
    for prompt in PROMPTS:
        for sampler in SAMPLERS:
            want = defer(prompt, sampler, wants, budget)
            assert_same(Deferral(by), prompt, sampler, want, knobs=dict(threshold=threshold, budget=budget))
            runs.append(want)
    both_write([0, 1], runs)


def test_r2r():
    cfg = HeadConfig(kind="r2r", hidden=WIDTH, width=12, top_k=5, blocks=2)
    params = dict(
        head=jax.tree.map(np.asarray, heads.init(cfg, 1)),
        embedding=np.random.default_rng(0).normal(0, 1, (VOCAB, WIDTH)),
    )

    def wants(logits, hidden, token):
        return r2r(params["head"], hidden, params["embedding"][token], -np.sort(-logits)[:5]) >= 0.55

    runs = []
    for prompt in PROMPTS:
        for sampler in SAMPLERS:
            runs.append(defer(prompt, sampler, wants))
            assert_same(R2R(cfg), prompt, sampler, runs[-1], params=params, knobs=dict(threshold=0.55))
    both_write([0, 1], runs)


CITER_HEAD = HeadConfig(kind="mlp", hidden=WIDTH, width=9)
GATE = HeadConfig(kind="linear", hidden=WIDTH)
BY_HIDDEN = {
    "citer": (CITER(CITER_HEAD), lambda params, h: mlp(params, h) < 0.5),
    "co_llm": (CoLLM(GATE), lambda params, h: sigmoid(params["output"]["weight"] @ h + params["output"]["bias"]) > 0.5),
    "critical": (CriticalTokens(CITER_HEAD), lambda params, h: mlp(params, h) >= 0.5),
}


@pytest.mark.parametrize("name", BY_HIDDEN)
def test_routers_on_the_hidden_state(name):
    program, rule = BY_HIDDEN[name]
    head = jax.tree.map(np.asarray, heads.init(program.head, 3))
    runs = []
    for prompt in PROMPTS:
        for sampler in SAMPLERS:
            runs.append(defer(prompt, sampler, lambda logits, hidden, token: bool(rule(head, hidden))))
            assert_same(program, prompt, sampler, runs[-1], params=dict(head=head))
    both_write([0, 1], runs)


@pytest.mark.parametrize("name", [*BY_HIDDEN, "r2r"])
@pytest.mark.parametrize("threshold", [2, -1])
def test_trained_routers_at_their_ends(name, threshold):
    """A probability is never 2, and always above -1."""
    cfg = HeadConfig(kind="r2r", hidden=WIDTH, width=12, top_k=5, blocks=2)
    program = R2R(cfg) if name == "r2r" else BY_HIDDEN[name][0]
    model = int((threshold < 0) != (name == "citer"))
    params = dict(head=heads.init(program.head, 1), embedding=np.ones((VOCAB, WIDTH), np.float32))
    alone = generate(Single(model), MODELS[:2], PROMPTS[1], limit=LIMIT, stops=STOPS)
    want = alone.tokens, [model] * len(alone.tokens)
    assert_same(program, PROMPTS[1], Sampler(), want, params=params, knobs=dict(threshold=threshold))


def test_the_pretrained_model_may_be_the_small_one():
    program = CriticalTokens(CITER_HEAD, aligned=1, pretrained=0)
    head = heads.init(CITER_HEAD, 3)
    want = defer(PROMPTS[1], SAMPLERS[0], lambda logits, h, token: bool(mlp(head, h) >= 0.5), small=1, large=0)
    assert_same(program, PROMPTS[1], SAMPLERS[0], want, params=dict(head=head))


def stitch(prompt, sampler):
    tokens, writers, model = list(prompt), [], 0
    while len(tokens) < LIMIT and not (writers and tokens[-1] in STOPS):
        logits, _ = step(model, tokens)
        uncertain = entropy(logits) / np.log(VOCAB) > TAU
        if model == 0 and uncertain:
            model = 1
            continue
        tokens.append(sampler.token(logits, len(tokens), model))
        writers.append(model)
        model = 1 if uncertain else 0
    return tokens[len(prompt) :], writers


def test_r_stitch():
    runs = []
    for prompt in PROMPTS:
        for sampler in SAMPLERS:
            runs.append(stitch(prompt, sampler))
            assert_same(RStitch(VOCAB), prompt, sampler, runs[-1], knobs=dict(threshold=TAU))
    both_write([0, 1], runs)
    assert any((1, 1) in zip(writers, writers[1:], strict=False) for _, writers in runs)  # the large one goes on


@cases
def test_model_ensemble(prompt, sampler):
    weights = [0.5, 0.3, 0.2]
    key = jax.random.key(jax.random.bits(sampler.key(0, 0, ROUTE_DRAW)))
    tokens, writers = list(prompt), []
    while len(tokens) < LIMIT and not (writers and tokens[-1] in STOPS):
        uniform = float(jax.random.uniform(jax.random.fold_in(key, len(tokens) if writers else 0)))
        model = int(np.searchsorted(np.cumsum(weights), uniform, side="right"))
        tokens.append(sampler.token(step(model, tokens)[0], len(tokens), model))
        writers.append(model)
    assert_same(ModelEnsemble(), prompt, sampler, (tokens[len(prompt) :], writers), models=3)


def test_the_ensemble_draws_by_its_weights():
    knobs = {f"w{i}": jnp.float32(w) for i, w in enumerate([1.0, 0.0, 3.0])}  # they need not sum to 1
    draw = jax.vmap(lambda seed: ModelEnsemble()._draw(knobs, seed, 5))
    counts = np.bincount(draw(jnp.arange(4000, dtype=jnp.uint32)), minlength=3)
    assert counts[1] == 0
    assert abs(counts[2] - 3000) < 4 * np.sqrt(4000 * 0.25 * 0.75)


@cases
def test_bernoulli_routes_a_share_and_replay_repeats_it(prompt, sampler):
    key = jax.random.key(jax.random.bits(sampler.key(0, 0, ROUTE_DRAW)))
    coin = lambda position: float(jax.random.uniform(jax.random.fold_in(key, position))) < 0.4
    tokens, writers = list(prompt), []
    while len(tokens) < LIMIT and not (writers and tokens[-1] in STOPS):
        model = int(coin(len(tokens)))
        tokens.append(sampler.token(step(model, tokens)[0], len(tokens), model))
        writers.append(model)
    want = tokens[len(prompt) :], writers
    assert_same(Bernoulli(), prompt, sampler, want, knobs=dict(share=0.4))
    trace = np.array([0] * len(prompt) + writers, np.int32)
    assert_same(Replay(), prompt, sampler, want, params=dict(trace=trace))


def test_replay_ends_at_the_small_model_beyond_its_trace():
    got = generate(Replay(), MODELS[:2], [3], params=dict(trace=np.array([0, 1, 1], np.int32)), limit=8)
    assert got.writers == [1, 1, 0, 0, 0, 0, 0]


@cases
@pytest.mark.parametrize(
    ("program", "never", "always"),
    [
        (Deferral("entropy"), dict(threshold=1e9), dict(threshold=-1)),
        (Deferral("max_prob"), dict(threshold=0), dict(threshold=2)),
        (Bernoulli(), dict(share=0), dict(share=1)),
        (RStitch(VOCAB), dict(threshold=2), dict(threshold=-1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_without_routing_it_is_the_small_model_and_with_nothing_else_the_large(prompt, sampler, program, never, always):
    for knobs, model in ((never, 0), (always, 1)):
        alone = generate(Single(model), MODELS[:2], prompt, limit=LIMIT, stops=STOPS, sampler=sampler)
        assert alone.writers == [model] * len(alone.tokens)
        assert_same(program, prompt, sampler, (alone.tokens, alone.writers), knobs=knobs)
