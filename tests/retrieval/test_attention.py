"""Attention to segments against a loop over layers, heads and words with everything in numpy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.config import UserError
from molora_jax.data.multihop.question import Segment
from molora_jax.models import transformer
from molora_jax.nn.layout import dense
from molora_jax.retrieval.attention import AttentionConfig, AttentionRanker
from tests import fakes
from tests.numerics import assert_close
from tests.retrieval.questions import Letters, question

CONFIG = AttentionConfig(layers=3, heads=2, longest=9)


def asked(texts=("Ada met Ben", "of", "Kim met Ada, and then Zoe"), support=(0, 2)):
    segments = tuple(
        Segment(title="", sentences=(text,), supporting=i in support, supporting_sentences=())
        for i, text in enumerate(texts)
    )
    return dataclasses.replace(question(), question="Who met Ada?", segments=segments)


@pytest.fixture(scope="module", params=["gemma3", "llama_untied"])
def model(request):
    return fakes.model(request.param)


def by_hand(cfg, params, found, config):
    """[layers, H, G]: queries and keys from the residual stream, softmax a word at a time."""
    words = Letters()
    parts = [words.encode(f"{s.text}\n", special=False)[: config.longest] for s in found.segments]
    tail = words.encode(f"Question: {found.question}", special=False)
    ids = [*words.encode(""), *(i for part in parts for i in part), *tail]
    taps = transformer.apply(cfg, params, jnp.asarray(ids), dense(1, len(ids)), taps=("queries", "keys")).taps
    q, k = (np.asarray(taps[name], np.float64) for name in ("queries", "keys"))
    mass = np.zeros((config.layers, cfg.heads, len(parts)))
    for i, h in np.ndindex(mass.shape[:2]):
        for t in range(len(ids) - len(tail), len(ids)):
            begin = max(t - cfg.windows[i] + 1, 0) if cfg.windows[i] else 0
            key = k[i, h * cfg.kv_heads // cfg.heads, :, begin : t + 1]
            weights = np.exp(cfg.attn_scale * q[i, h, :, t] @ key)
            weights = np.pad(weights / weights.sum(), (begin, 0))
            at = 1
            for g, part in enumerate(parts):
                mass[i, h, g] += weights[at : at + len(part)].sum() / len(tail)
                at += len(part)
    return mass


def test_the_mass_of_every_head(model):
    cfg, params = model
    ranker = AttentionRanker(cfg, params, Letters(), CONFIG)
    assert_close(ranker.mass(asked()), by_hand(cfg, params, asked(), CONFIG), "model")
    assert ranker.tokens == 1 + 9 + 3 + 9 + len("Question: Who met Ada?")


def test_the_heads_that_attend_to_evidence_are_kept(model):
    cfg, params = model
    ranker = AttentionRanker(cfg, params, Letters(), CONFIG)
    with pytest.raises(UserError, match="call choose"):
        ranker.scores(asked())
    others = [asked(("Zoe", "Ada met Zoe", "Ben"), (1,)), asked(("Kim", "Zoe met Ada"), (1,))]
    ranker.choose(others)
    paid = np.mean([by_hand(cfg, params, own, CONFIG)[..., 1] for own in others], axis=0)
    kept = sorted(zip(*ranker.heads, strict=True), key=lambda at: -paid[at])
    assert [paid[at] for at in kept] == pytest.approx(sorted(paid.ravel())[:-3:-1], rel=1e-4)
    want = np.mean([by_hand(cfg, params, asked(), CONFIG)[at] for at in kept], axis=0)
    assert_close(ranker.scores(asked()), want, "model")


def test_refusals(model):
    with pytest.raises(UserError, match="expected positive"):
        AttentionConfig(heads=0)
    with pytest.raises(UserError, match="got 90 layers"):
        AttentionRanker(*model, Letters(), AttentionConfig(layers=90))
