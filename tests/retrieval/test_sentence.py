"""The sentence encoder against plain loops in fp64."""

import json
import math

import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from molora_jax.config import UserError
from molora_jax.retrieval import sentence

D, F, HEADS, LAYERS, WORDS = 8, 12, 2, 2, ["[PAD]", "[UNK]", "a", "b", "c", "d", "e"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny BERT with random weights."""
    path, rng = tmp_path_factory.mktemp("bert"), np.random.default_rng(0)
    made = {}

    def linear(name, rows, columns):
        made[f"{name}.weight"] = rng.normal(size=(rows, columns))
        made[f"{name}.bias"] = rng.normal(size=rows)

    def norm(name):
        made[f"{name}.weight"], made[f"{name}.bias"] = rng.normal(size=D), rng.normal(size=D)

    for name, rows in (("word", len(WORDS)), ("position", 300), ("token_type", 2)):
        made[f"embeddings.{name}_embeddings.weight"] = rng.normal(size=(rows, D))
    norm("embeddings.LayerNorm")
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            linear(f"{layer}.attention.{part}", D, D)
        linear(f"{layer}.intermediate.dense", F, D)
        linear(f"{layer}.output.dense", D, F)
        norm(f"{layer}.attention.output.LayerNorm")
        norm(f"{layer}.output.LayerNorm")
    safetensors.numpy.save_file({k: v.astype(np.float32) for k, v in made.items()}, path / "model.safetensors")
    config = dict(model_type="bert", hidden_act="gelu", num_hidden_layers=LAYERS, num_attention_heads=HEADS)
    (path / "config.json").write_text(json.dumps(config | dict(layer_norm_eps=1e-12)))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(path / "tokenizer.json"))
    return path


def reference(folder, text):
    w = {k: v.astype(np.float64) for k, v in safetensors.numpy.load_file(folder / "model.safetensors").items()}

    def norm(name, x):
        return (x - x.mean()) / math.sqrt(x.var() + 1e-12) * w[f"{name}.weight"] + w[f"{name}.bias"]

    linear = lambda name, x: w[f"{name}.weight"] @ x + w[f"{name}.bias"]
    gelu = lambda x: np.array([v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x])
    ids = [WORDS.index(word) for word in text.split()][: sentence.LONGEST]
    tables = [w[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")]
    h = [norm("embeddings.LayerNorm", tables[0][v] + tables[1][i] + tables[2][0]) for i, v in enumerate(ids)]
    for i in range(LAYERS):
        name, out = f"encoder.layer.{i}", []
        q, k, v = ([linear(f"{name}.attention.self.{p}", x) for x in h] for p in ("query", "key", "value"))
        for t in range(len(h)):
            parts = []
            for head in range(HEADS):
                cut = slice(head * D // HEADS, (head + 1) * D // HEADS)
                weights = np.array([math.exp(q[t][cut] @ k[s][cut] / math.sqrt(D // HEADS)) for s in range(len(h))])
                parts.append(sum(a * b[cut] for a, b in zip(weights / weights.sum(), v, strict=True)))
            x = norm(
                f"{name}.attention.output.LayerNorm",
                h[t] + linear(f"{name}.attention.output.dense", np.concatenate(parts)),
            )
            hidden = gelu(linear(f"{name}.intermediate.dense", x))
            out.append(norm(f"{name}.output.LayerNorm", x + linear(f"{name}.output.dense", hidden)))
        h = out
    mean = np.mean(h, axis=0)
    return mean / np.linalg.norm(mean)


def test_vectors_against_loops_whatever_the_neighbours(folder):
    encoder = sentence.read(folder)
    texts = ["a b c", "d", "e d c b a " * 9, *(f"a {'b ' * (i % 3)}c" for i in range(20))]
    found = encoder.embed(texts)
    for text, got in zip(texts, found, strict=True):
        np.testing.assert_allclose(got, reference(folder, text), atol=2e-5)
    assert encoder.tokens == encoder.count(texts) == sum(len(text.split()) for text in texts)
    np.testing.assert_allclose(encoder.embed(texts[:1]), found[:1], atol=1e-6)


def test_long_texts_are_cut(folder):
    encoder = sentence.read(folder)
    [got, same] = encoder.embed(["a b " * 140, "a b " * 128])
    np.testing.assert_array_equal(got, same)


def test_what_is_no_sentence_encoder_is_said(folder, tmp_path):
    with pytest.raises(UserError, match="config.json"):
        sentence.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="t5", hidden_act="relu")))
    with pytest.raises(UserError, match="expected bert"):
        sentence.read(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(UserError, match="cannot be read"):
        sentence.read(tmp_path)
