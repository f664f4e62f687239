"""Programs that fuse the logits of all models, and the one that picks adapters, against numpy."""

import numpy as np
import pytest

from molora_jax.routing.program import KEEP, Mode
from molora_jax.routing.programs.contrastive import Contrastive
from molora_jax.routing.programs.logit_ensemble import LogitEnsemble
from molora_jax.routing.programs.proxy_tuning import ProxyTuning
from molora_jax.routing.programs.token_adapters import TokenAdapters
from tests.routing.naive_route import Sampler, generate
from tests.routing.numpy_heads import softmax
from tests.routing.small_models import decoder, table

MODELS = [decoder(0), decoder(1), decoder(2)]
LIMIT, STOPS = 30, (11,)


def contrastive(small, large):
    plausible = softmax(large) >= 0.2 * softmax(large).max()
    return np.where(plausible, np.log(softmax(large)) - 0.7 * np.log(softmax(small)), -np.inf)


def mixture(*logits):
    return np.log(0.5 * softmax(logits[0]) + 0.1 * softmax(logits[1]) + 0.4 * softmax(logits[2]))


CASES = {
    "proxy": (ProxyTuning(), dict(strength=0.8), lambda anti, expert, base: base + 0.8 * (expert - anti)),
    "contrastive": (Contrastive(), dict(alpha=0.2, strength=0.7), contrastive),
    "mixture": (LogitEnsemble(models=3), dict(w0=5, w1=1, w2=4), mixture),
    "product": (LogitEnsemble(space="logit"), dict(w0=0.25, w1=0.75), lambda a, b: 0.25 * a + 0.75 * b),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=1.0, seed=3)])
def test_fused_decoding_by_hand(name, sampler):
    program, knobs, fuse = CASES[name]
    for prompt in ([3], [5, 1, 4, 1]):
        tokens, models = list(prompt), MODELS[: program.models]
        while len(tokens) < LIMIT and not (len(tokens) > len(prompt) and tokens[-1] in STOPS):
            rows = [model(tokens, [])[0][-1].astype(np.float64) for model in models]
            tokens.append(sampler.token(fuse(*rows), len(tokens), program.models - 1))
        got = generate(program, models, prompt, knobs=knobs, limit=LIMIT, stops=STOPS, sampler=sampler)
        assert got.tokens == tokens[len(prompt) :]
        assert {mode for _, mode in got.runs} == {Mode.FUSE}
        alone = [generate_alone(model, prompt, sampler) for model in models]
        assert got.tokens not in alone or len(got.tokens) < 5  # the fusion does something


def generate_alone(model, prompt, sampler):
    tokens = list(prompt)
    while len(tokens) < LIMIT and not (len(tokens) > len(prompt) and tokens[-1] in STOPS):
        tokens.append(sampler.token(model(tokens, [])[0][-1], len(tokens), 0))
    return tokens[len(prompt) :]


def test_an_implausible_token_is_never_drawn():
    large = np.array([3.0, 2.9, -4.0, -4.0], np.float32)
    small = np.array([3.0, 0.0, -90.0, -4.0], np.float32)  # token 2: hated by the small model alone
    fused = np.asarray(
        Contrastive().fuse(None, dict(alpha=np.float32(0.1), strength=np.float32(1)), (), np.stack([small, large]))
    )
    assert np.isneginf(fused[2:]).all()
    assert fused.argmax() == 1


@pytest.mark.parametrize("by", ["gate", "table", "control"])
def test_adapters_by_hand(by):
    V, D, E = 12, 4, 3
    model, rng = table(5, V), np.random.default_rng(0)
    weight, bias = rng.normal(0, 1, (E, D)).astype(np.float32), rng.normal(0, 0.1, E).astype(np.float32)
    choice = rng.integers(-1, E, V).astype(np.int32)
    if by == "control":
        choice[:8] = KEEP
    tokens, adapters = [1, 2], [1, 1]
    while len(tokens) < LIMIT:
        logits, hidden = model(tokens, adapters)
        tokens.append(int(np.argmax(logits[-1])))
        if by == "gate":
            adapters.append(int(np.argmax(weight @ hidden[-1] + bias)))
        else:
            new = int(choice[tokens[-1]])
            adapters.append(adapters[-1] if new == KEEP else new)
    params = dict(weight=weight, bias=bias) if by == "gate" else dict(table=choice)
    got = generate(TokenAdapters(by, first=1), [model], [1, 2], params=params, limit=LIMIT)
    assert (got.tokens, got.adapters) == (tokens[2:], adapters[2:])
    assert len(set(got.adapters)) > 1
