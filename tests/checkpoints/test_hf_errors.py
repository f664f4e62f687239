"""Every bad HF folder ends in one line that names what is wrong."""

import os

import jax
import numpy as np
import pytest

from molora_jax.checkpoints import hf
from molora_jax.config import UserError
from tests import golden
from tests.checkpoints import tiny


def message(folder, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        hf.load(folder, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def changed(folder, name="llama_untied", config=None, drop=(), add=None):
    """A golden folder with other config keys, and with tensors left out and added."""
    hf_config, weights, _, _ = golden.load(name)
    weights = {key: value for key, value in weights.items() if key not in drop}
    tiny.write(folder, hf_config | (config or {}), weights | (add or {}))


def test_missing_folder(tmp_path):
    assert "got no such folder" in message(tmp_path / "nowhere")


def test_missing_config(tmp_path):
    changed(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "config.json: got no such file" in message(tmp_path)


@pytest.mark.parametrize(("text", "expected"), [("{", "got no JSON"), ("[]", "got a JSON list")])
def test_broken_config(tmp_path, text, expected):
    changed(tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert expected in message(tmp_path)


def test_unknown_architecture(tmp_path):
    changed(tmp_path, config={"model_type": "gpt_neox"})
    assert "'gpt_neox'" in message(tmp_path)


def test_no_weights(tmp_path):
    changed(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "got a folder without weights, expected model.safetensors" in message(tmp_path)


def test_pickles_are_refused_with_the_way_to_convert(tmp_path):
    changed(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "save_pretrained(folder, safe_serialization=True)" in message(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_file_cut_short(tmp_path, keep):
    changed(tmp_path)
    file = tmp_path / "model.safetensors"
    os.truncate(file, keep if keep >= 0 else file.stat().st_size - 1)
    assert "got no whole safetensors file" in message(tmp_path)


def test_a_foreign_file(tmp_path):
    changed(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"GGUF" * 1000)
    assert "got no whole safetensors file" in message(tmp_path)


def test_a_missing_shard(tmp_path):
    tiny.hf_folder(tmp_path, "llama_untied", shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "got 2 of the 3 shards" in message(tmp_path)
    assert "model-00002-of-00003.safetensors is missing" in message(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_broken_index(tmp_path, text):
    tiny.hf_folder(tmp_path, "llama_untied", shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "got no JSON with a weight_map" in message(tmp_path)


def test_a_missing_tensor(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    changed(tmp_path, drop=[name])
    assert message(tmp_path).endswith(f"got a llama checkpoint without {name}")


def test_many_missing_tensors_are_counted(tmp_path):
    changed(tmp_path, config={"num_hidden_layers": 5})
    assert "model.layers.3.input_layernorm.weight" in message(tmp_path)
    assert "and 15 more tensors" in message(tmp_path)  # two layers of 9, three of them spelled out


def test_a_wrong_shape_names_the_tensor_and_both_shapes(tmp_path):
    changed(tmp_path, config={"intermediate_size": 45})
    assert "got shape (36, 44) for model.layers.0.mlp.down_proj.weight, expected (36, 45)" in message(tmp_path)


def test_unused_tensors(tmp_path):
    extra = {f"model.layers.0.experts.{i}.weight": np.ones(2, np.float32) for i in range(5)}
    changed(tmp_path, add=extra)
    assert "experts.0.weight" in message(tmp_path)
    assert "and 2 more tensors, which no llama decoder" in message(tmp_path)


def test_untied_without_a_head(tmp_path):
    changed(tmp_path, "llama_tied", config={"tie_word_embeddings": False})
    assert "without lm_head.weight; if its head is the embedding, set tie_word_embeddings" in message(tmp_path)


@pytest.mark.parametrize("shape", [(97, 36), (96, 36)])
def test_tied_with_another_head(tmp_path, shape):
    _, weights, _, _ = golden.load("llama_tied")
    head = weights["model.embed_tokens.weight"][: shape[0]].copy()
    head[-1, -1] += 1
    changed(tmp_path, "llama_tied", add={"lm_head.weight": head})
    assert "lm_head.weight differs from it" in message(tmp_path)


def test_quantised_tensors(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    changed(tmp_path, add={name: np.ones((44, 36), np.int8)})
    assert f"got dtype I8 for {name}" in message(tmp_path)


@pytest.mark.skipif(jax.config.jax_enable_x64, reason="float64 is a dtype of this process")
def test_float64_without_x64(tmp_path):
    changed(tmp_path)
    assert "needs jax.config.update('jax_enable_x64', True)" in message(tmp_path, dtype=np.float64)


def test_save_refuses_another_tree(tmp_path):
    cfg, params = golden.params("llama_tied")
    with pytest.raises(UserError, match="another structure"):
        hf.save(tmp_path, cfg, {key: params[key] for key in ("embed", "layers")})
    wrong = params | {"embed": {"weight": params["embed"]["weight"][:-1]}}
    with pytest.raises(UserError, match=r"got shape \(96, 36\) for model.embed_tokens.weight, expected \(97, 36\)"):
        hf.save(tmp_path, cfg, wrong)
    assert not list(tmp_path.iterdir())
