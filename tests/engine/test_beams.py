"""Beam search against a plain one that reads everything again for every hypothesis."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.gate import GateConfig
from molora_jax.adapters.library import Library
from molora_jax.adapters.route import Route
from molora_jax.config import UserError
from molora_jax.engine import beams
from molora_jax.engine.request import Request
from molora_jax.models import transformer
from molora_jax.nn.layout import dense
from tests import experts, fakes
from tests import naive as naive_text

CFG, PARAMS = fakes.model("llama_tied")
PROMPTS = [[5, 9, 2, 7, 7, 1, 30], [3], [11, 4, 8, 2] * 5]


@jax.jit
def _next(params, bank, tokens, length):
    extra = {} if bank is None else dict(bank=bank, route=Route.of(jnp.zeros(tokens.shape, jnp.int32)))
    layout = dense(1, len(tokens), valid=(jnp.arange(len(tokens)) < length)[None])
    hidden = transformer.apply(CFG, params, tokens, layout, **extra).hidden[length - 1][None]
    ids = {} if bank is None else dict(bank=bank, ids=jnp.zeros(1, jnp.int32))
    return jax.nn.log_softmax(transformer.logits(CFG, params, hidden, **ids)[0])


def scores(tokens, bank=None):
    padded = jnp.zeros(40, jnp.int32).at[: len(tokens)].set(jnp.array(tokens))
    return np.asarray(_next(PARAMS, bank, padded, len(tokens)), np.float64)


def naive(prompt, width, steps, stops, penalty, bank=None):
    """Lists of (Σ log p, tokens), all extensions of all hypotheses sorted at each step."""
    live, done = [(0.0, [])], []
    for step in range(steps):
        grown = [
            (total + s, [*tokens, v]) for total, tokens in live for v, s in enumerate(scores(prompt + tokens, bank))
        ]
        best = sorted(grown, key=lambda g: -g[0])[:width]
        over = [g for g in best if g[1][-1] in stops or step == steps - 1]
        live = [g for g in best if g not in over]
        done = sorted(done + over, key=lambda g: -g[0] / len(g[1]) ** penalty)[:width]
    return done


@pytest.mark.parametrize(("width", "steps", "penalty"), [(1, 5, 1.0), (3, 4, 1.0), (4, 6, 0.0)])
def test_against_a_plain_search(width, steps, penalty):
    stops = (6, 13, 25, 40)
    found = beams.search(CFG, PARAMS, PROMPTS, beams=width, max_new_tokens=steps, stops=stops, penalty=penalty)
    for prompt, got in zip(PROMPTS, found, strict=True):
        want = naive(prompt, width, steps, stops, penalty)
        assert [beam.tokens for beam in got] == [tokens for _, tokens in want]
        np.testing.assert_allclose([beam.logprob for beam in got], [total for total, _ in want], rtol=1e-4)
        assert [beam.finished for beam in got] == ["stop" if t[-1] in stops else "length" for _, t in want]
    passes = {beam.passes for got in found for beam in got}
    longest = max(len(beam.tokens) for got in found for beam in got)
    assert len(passes) == 1
    assert longest - 1 <= passes.pop() <= steps - 1


def test_one_beam_is_greedy():
    stops = (6, 13, 25, 40, 17, 33)
    found = beams.search(CFG, PARAMS, PROMPTS, beams=1, max_new_tokens=9, stops=stops)
    for prompt, [got] in zip(PROMPTS, found, strict=True):
        request = Request(prompt=prompt, max_new_tokens=9, stops=stops)
        assert (got.tokens, got.finished) == naive_text.generate(CFG, PARAMS, request)
        assert got.passes == max(len(one.tokens) for [one] in found) - 1


def test_beams_as_wide_as_all_pairs_find_the_best_of_all_texts():
    """Σ log p over every text of two tokens; the vocabulary's worth of beams keeps each first token."""
    [found] = beams.search(CFG, PARAMS, PROMPTS[:1], beams=CFG.vocab, max_new_tokens=2, penalty=0.0)
    first = scores(PROMPTS[0])
    second = np.stack([scores([*PROMPTS[0], v]) for v in range(CFG.vocab)])
    total = first[:, None] + second
    best = np.unravel_index(np.argsort(-total, axis=None)[:5], total.shape)
    assert [tuple(beam.tokens) for beam in found[:5]] == list(zip(*(axis.tolist() for axis in best), strict=True))


@pytest.mark.parametrize("kind", ["plain", "ends"])
def test_with_an_expert(kind):
    bank = Library.holding([experts.adapter(CFG, PARAMS, kind)], PARAMS).bank
    how = dict(beams=3, max_new_tokens=4)
    base = beams.search(CFG, PARAMS, PROMPTS[:1], **how)
    [found] = beams.search(CFG, PARAMS, PROMPTS[:1], bank=bank, expert=0, **how)
    want = naive(PROMPTS[0], 3, 4, (), 1.0, bank)
    assert [beam.tokens for beam in found] == [tokens for _, tokens in want] != [beam.tokens for beam in base[0]]
    [bare] = beams.search(CFG, PARAMS, PROMPTS[:1], bank=bank, **how)  # no expert is the base
    assert [beam.tokens for beam in bare] == [beam.tokens for beam in base[0]]
    np.testing.assert_allclose([beam.logprob for beam in bare], [beam.logprob for beam in base[0]], rtol=1e-5)


def gated():
    """A gated expert whose scales differ from token to token."""
    gate = GateConfig(start="published", states=2, output="diagonal")
    made = fresh(CFG, PARAMS, "gated", rank=2, sites=("attn.q_proj", "mlp.up_proj"), seed=1, spread=0.5, gate=gate)
    loud = lambda core: core | {name: jax.tree.map(lambda v: v * 20, core[name]) for name in ("out", "proj")}
    return dataclasses.replace(
        made, gates=tuple(dataclasses.replace(group, cores=tuple(map(loud, group.cores))) for group in made.gates)
    )


def test_the_states_of_gates_follow_the_beams(monkeypatch):
    bank = Library.holding([gated()], PARAMS).bank
    search = lambda penalty: [
        [beam.tokens for beam in got]
        for got in beams.search(
            CFG, PARAMS, PROMPTS[:2], beams=4, max_new_tokens=6, bank=bank, expert=0, penalty=penalty
        )
    ]
    want = lambda penalty: [[tokens for _, tokens in naive(p, 4, 6, (), penalty, bank)] for p in PROMPTS[:2]]
    assert search(1.0) == want(1.0)
    monkeypatch.setattr(beams, "restore", lambda state, slots, saved: state)  # left where they were, they mislead
    assert search(0.5) != want(0.5)  # another penalty, so that it is traced anew


@pytest.mark.parametrize(
    ("prompts", "fields", "said"),
    [
        ([], {}, "no prompt"),
        ([[]], {}, "no prompt or an empty one"),
        ([[-1]], {}, "expected 0 to"),
        ([[1]], dict(beams=0), "0 beams"),
        ([[1]], dict(penalty=-1.0), "penalty -1.0"),
    ],
)
def test_what_cannot_be_searched(prompts, fields, said):
    with pytest.raises(UserError, match=said):
        beams.search(CFG, PARAMS, prompts, **fields)
