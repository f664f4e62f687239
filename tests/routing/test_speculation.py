"""Programs that verify drafts: their distributions, their acceptance rules, and loops written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.routing import acceptance
from molora_jax.routing.program import VERIFY_DRAW, Draft, Mode, knob_values
from molora_jax.routing.programs.bild import BiLD
from molora_jax.routing.programs.single import Single
from molora_jax.routing.programs.speculative import Speculative
from molora_jax.routing.programs.speculative_cascade import SpeculativeCascade
from tests.routing.naive_route import Sampler, generate
from tests.routing.numpy_heads import softmax
from tests.routing.small_models import decoder, table

RULES = ("chow", "diff", "opt", "token")


def draft_of(q_logits, p_logits, tokens, count, *, greedy=False) -> Draft:
    mass = (lambda x: np.eye(x.shape[-1])[np.argmax(x, -1)]) if greedy else softmax
    f32 = lambda x: jnp.asarray(x, jnp.float32)
    tables = [f32(table) for table in (mass(q_logits), mass(p_logits), q_logits, p_logits)]
    return Draft(jnp.asarray(tokens, jnp.int32), jnp.int32(count), *tables)


def rule_target(rule: str, q, p, alpha: float):
    """The distribution of one token, from both models', by the formulas of the paper."""
    if rule == "token":
        bad = p < (1 - alpha) * p.max()
        return q * ~bad + p * q[bad].sum()
    defers = {
        "chow": q.max() < 1 - alpha,
        "diff": q.max() < p.max() - alpha,
        "opt": q.max() < p.max() - alpha * 0.5 * np.abs(p - q).sum(),
    }[rule]
    return p if defers else q


@pytest.mark.parametrize("rule", RULES)
def test_the_target_of_a_cascade(rule):
    rng = np.random.default_rng(0)
    program, kinds = SpeculativeCascade(draft=3, rule=rule), set()
    for _ in range(40):
        q, p = rng.normal(0, 2, (3, 6)), rng.normal(0, 2, (4, 6))
        count = int(rng.integers(0, 4))
        target = program.target({"alpha": jnp.float32(0.3)}, draft_of(q, p, [0, 0, 0], count))
        for i in range(count):
            want = rule_target(rule, softmax(q[i]), softmax(p[i]), 0.3)
            np.testing.assert_allclose(target[i], want, rtol=1e-5, atol=1e-6)
            kinds |= {bool(np.allclose(want, softmax(q[i])))}
        np.testing.assert_allclose(target[count], softmax(p[count]), rtol=1e-5)
    assert kinds == ({False} if rule == "token" else {True, False})  # only `token` mixes the two


def chi_square(counts, want) -> float:
    """Statistic over its degrees of freedom's mean, in standard deviations."""
    expected = want * counts.sum()
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    degrees = kept.sum() - 1
    return (((counts - expected)[kept] ** 2 / expected[kept]).sum() - degrees) / np.sqrt(2 * max(degrees, 1))


PROGRAMS = [Speculative(draft=2), *(SpeculativeCascade(draft=2, rule=rule) for rule in RULES)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: getattr(program, "rule", "decoding"))
def test_tokens_have_the_distribution_they_should(program):
    """Of many drafts sampled from q, the first token and the one after a first that stayed."""
    rng = np.random.default_rng(1)
    q_logits, p_logits = rng.normal(0, 1.2, (2, 5)), rng.normal(0, 1.2, (3, 5))
    q, p = softmax(q_logits), softmax(p_logits)
    knobs = knob_values(program, {"alpha": 0.35} if program.knobs else {})

    @jax.jit
    @jax.vmap
    def one(key):
        keys = jax.random.split(key)
        tokens = jax.random.categorical(keys[0], jnp.asarray(q_logits))
        draft = draft_of(q_logits, p_logits, [0, 0], 2)
        draft = Draft(tokens.astype(jnp.int32), draft.count, draft.q, draft.p, draft.q_logits, draft.p_logits)
        return tokens, *program.accept({}, knobs, (), draft, keys[1])

    tokens, count, token = (np.asarray(x) for x in one(jax.random.split(jax.random.key(3), 40_000)))
    targets = [rule_target(program.rule, q[i], p[i], 0.35) if program.knobs else p[i] for i in range(2)]
    first = np.where(count > 0, tokens[:, 0], token)
    second = np.where(count > 1, tokens[:, 1], token)[count > 0]
    third = token[count > 1]
    for got, want in ((first, targets[0]), (second, targets[1]), (third, p[2])):
        assert len(got) > 2000
        assert chi_square(np.bincount(got, minlength=5), want) < 4
    if not program.knobs:  # it could have failed: the drafts themselves are far from p
        assert chi_square(np.bincount(tokens[:, 0], minlength=5), targets[0]) > 20
        np.testing.assert_allclose(np.mean(count > 0), np.minimum(p[0], q[0]).sum(), atol=0.01)


def test_acceptance_is_that_of_a_numpy_loop():
    rng = np.random.default_rng(2)
    rejection = jax.jit(acceptance.rejection)
    for _ in range(60):
        K, V, count = 4, 7, int(rng.integers(0, 5))
        q_logits, p_logits = rng.normal(0, 2, (K, V)), rng.normal(0, 2, (K + 1, V))
        draft = draft_of(q_logits, p_logits, rng.integers(0, V, K), count)
        key = jax.random.key(int(rng.integers(1000)))
        q, p, u = (np.asarray(x, np.float64) for x in (draft.q, draft.p, jax.random.uniform(key, (K + 1,))))
        n = 0
        while n < count and u[n] < p[n, draft.tokens[n]] / q[n, draft.tokens[n]]:
            n += 1
        mass = np.maximum(p[n] - q[n], 0) if n < count else p[n]
        token = np.searchsorted(np.cumsum(mass), u[-1] * mass.sum(), side="right")
        assert tuple(map(int, rejection(draft, draft.p, key))) == (n, token)


def test_equal_distributions_keep_every_draft():
    logits = np.random.default_rng(3).normal(0, 2, (4, 6))
    draft = draft_of(logits[:3], logits, [0, 1, 2], 3)
    for seed in range(20):
        assert int(acceptance.rejection(draft, draft.p, jax.random.key(seed))[0]) == 3


def test_a_token_without_mass_is_never_drawn():
    mass = jnp.array([0.0, 0.3, 0.0, 0.7, 0.0])
    assert {int(acceptance.draw(mass, jnp.float32(u))) for u in (0.0, 0.29)} == {1}
    assert {int(acceptance.draw(mass, jnp.float32(u))) for u in (0.31, 0.9999999)} == {3}


MODELS = [decoder(0), decoder(1)]
PROMPTS = [[3], [5, 1, 4, 1], [2, 7, 1, 8, 2, 8]]
LIMIT, STOPS = 40, (11,)


@pytest.mark.parametrize("K", [1, 4, 9])
def test_greedy_speculation_writes_what_the_large_model_alone_does(K):
    verified = written = 0
    for program in (Speculative(draft=K), SpeculativeCascade(draft=K, rule="chow")):
        knobs = {"alpha": -1.0} if program.knobs else {}  # every token defers
        for prompt in PROMPTS:
            given = dict(limit=LIMIT, stops=STOPS)
            got = generate(program, MODELS, prompt, knobs=knobs, **given)
            alone = generate(Single(1), MODELS, prompt, **given)
            assert (got.tokens, got.finished) == (alone.tokens, alone.finished)
            assert got.final == sorted(got.final)  # what was streamed is never taken back
            verified += sum(mode == Mode.VERIFY for _, mode in got.runs)
            written += len(got.tokens)
    assert verified < 0.8 * written


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_cascade_that_never_defers_keeps_every_draft(prompt):
    got = generate(SpeculativeCascade(draft=4, rule="chow"), MODELS, prompt, knobs={"alpha": 2.0}, limit=LIMIT)
    assert got.writers == ([0, 0, 0, 0, 1] * LIMIT)[: len(got.writers)]


def draft_and_verify(prompt, sampler, K: int, accept, unsure=lambda logits: False):
    """Drafts by model 0, a verdict by model 1 on what it has drafted; an unsure token is not even drafted."""
    logits_of = lambda model, tokens: MODELS[model](tokens, [-1] * len(tokens))[0].astype(np.float64)
    tokens, start = list(prompt), len(prompt)
    over = lambda: len(tokens) > start and (tokens[-1] in STOPS or len(tokens) >= LIMIT)
    while not over():
        first, own = len(tokens), []
        while len(tokens) - first < K and not over():
            logits = logits_of(0, tokens)[-1]
            if unsure(logits):
                break
            own.append(logits)
            tokens.append(sampler.token(logits, len(tokens), 0))
        rows = logits_of(1, tokens)[first - 1 :]
        count, token = accept(np.array(own), rows, tokens[first:], sampler.key(first, 1, VERIFY_DRAW))
        del tokens[first + count :]
        if not (count and over()):
            tokens.append(int(token))
    return tokens[start:]


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=1.0, seed=5)])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_speculative_decoding_by_hand(prompt, sampler):
    def accept(own, rows, held, key):
        u = np.asarray(jax.random.uniform(key, (5,)), np.float64)
        p, n = np.stack([sampler.probabilities(row) for row in rows]), 0
        q = [sampler.probabilities(row) for row in own]
        while n < len(held) and u[n] * q[n][held[n]] < p[n][held[n]]:
            n += 1
        mass = np.maximum(p[n] - q[n], 0) if n < len(held) else p[n]
        return n, np.searchsorted(np.cumsum(mass), u[-1] * mass.sum(), side="right")

    got = generate(Speculative(draft=4), MODELS, prompt, limit=LIMIT, stops=STOPS, sampler=sampler)
    assert got.tokens == draft_and_verify(prompt, sampler, 4, accept)


@pytest.mark.parametrize("fallback", [0.0, 0.35, 2.0])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_bild_by_hand(prompt, fallback):
    def accept(own, rows, held, key):
        for i, token in enumerate(held):
            if -np.log(softmax(rows[i])[token]) > 1.2:
                return i, np.argmax(rows[i])
        return len(held), np.argmax(rows[-1])

    knobs = dict(fallback=fallback, rollback=1.2)
    got = generate(BiLD(draft=5), MODELS, prompt, knobs=knobs, limit=LIMIT, stops=STOPS)
    unsure = lambda logits: softmax(logits).max() < fallback
    assert got.tokens == draft_and_verify(prompt, Sampler(), 5, accept, unsure)
    if fallback == 2:  # the small model is never sure: the large one alone
        assert got.tokens == generate(Single(1), MODELS, prompt, limit=LIMIT, stops=STOPS).tokens


def test_whole_answers_have_the_large_models_distribution():
    """Speculation from first to last: all answers of two tokens, by chi-square."""
    V, models = 3, [table(0, 3, sharpness=1.0), table(1, 3, sharpness=1.0)]
    want = np.zeros((V, V))
    for a in range(V):
        want[a] = softmax(models[1]([1], [-1])[0][-1])[a] * softmax(models[1]([1, a], [-1] * 2)[0][-1])
    counts = np.zeros((V, V))
    for seed in range(800):
        sampler = Sampler(temperature=1.0, seed=seed)
        got = generate(Speculative(draft=3), models, [1], limit=3, sampler=sampler)
        counts[tuple(got.tokens)] += 1
    assert chi_square(counts.ravel(), want.ravel()) < 4


def test_a_draft_ends_with_its_stop_token():
    """Nothing follows a stop token that was kept, and one that was not kept ends nothing."""
    V = 5
    always = lambda *tokens: (
        lambda read, adapters: (
            np.stack([9 * np.eye(V)[tokens[min(i, len(tokens) - 1)]] for i in range(len(read))]),
            np.zeros((len(read), 1)),
        )
    )
    small, same, other = always(1, 4, 2, 2), always(1, 4, 2, 2), always(1, 3, 2, 2)
    kept = generate(Speculative(draft=4), [small, same], [0], limit=9, stops=(4,))
    assert (kept.tokens, kept.finished) == ([1, 4], "stop")
    gone = generate(Speculative(draft=4), [small, other], [0], limit=9, stops=(4,))
    assert (gone.tokens, gone.finished) == ([1, 3] + [2] * 6, "length")
