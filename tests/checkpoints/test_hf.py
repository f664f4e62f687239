"""HF folders: what is loaded is what lies in the files, and what is saved loads again."""

import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from molora_jax.checkpoints import hf, tensors
from molora_jax.models import families
from tests import golden
from tests.checkpoints import tiny

FILE_DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]


def assert_equal(got, expected):
    """Same structure, dtypes and bytes."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def unstack(params):
    layers = len(jax.tree.leaves(params["layers"])[0])
    return params | {"layers": [jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(layers)]}


def read_all(folder: pathlib.Path) -> dict[str, np.ndarray]:
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= safetensors.numpy.load_file(file)
    return found


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", golden.names())
def test_every_family_loads_stacked_and_as_a_list(tmp_path, name, shards):
    tiny.hf_folder(tmp_path, name, shards=shards)
    cfg, expected = golden.params(name)
    got_cfg, stacked = hf.load(tmp_path)
    _, listed = hf.load(tmp_path, stacked=False)
    assert got_cfg == cfg
    assert_equal(stacked, expected)
    assert_equal(listed, unstack(expected))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("file_dtype", FILE_DTYPES)
def test_file_dtypes_are_cast_to_the_asked_one(tmp_path, file_dtype, dtype):
    weights = tiny.hf_folder(tmp_path, "llama_untied", file_dtype)
    _, params = hf.load(tmp_path, dtype=dtype)
    for got, name in [
        (params["head"]["weight"], "lm_head.weight"),
        (params["layers"]["attn"]["k_proj"]["weight"][2], "model.layers.2.self_attn.k_proj.weight"),
    ]:
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got), weights[name].astype(dtype))


@pytest.mark.parametrize("piece", [1, 500])
def test_reading_in_small_pieces_changes_nothing(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(tensors, "_PIECE_BYTES", piece)
    tiny.hf_folder(tmp_path, "qwen2", ml_dtypes.bfloat16, shards=2)
    _, got = hf.load(tmp_path)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), golden.params("qwen2")[1])
    assert_equal(got, rounded)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, np.float64])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("name", ["gemma3_rope_linear", "llama_bias", "llama_rope_llama3", "llama_untied", "qwen3"])
def test_save_writes_the_tensors_and_the_config_of_the_model(tmp_path, name, listed, dtype):
    cfg, params = golden.params(name)
    _, weights, _, _ = golden.load(name)
    hf.save(tmp_path, cfg, unstack(params) if listed else params, dtype=dtype)
    written = read_all(tmp_path)
    assert set(written) == set(weights)
    for key, value in weights.items():
        np.testing.assert_array_equal(written[key], value.astype(dtype or np.float32), strict=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert families.from_hf(config) == cfg
    assert config["torch_dtype"] == np.dtype(dtype or np.float32).name


@pytest.mark.parametrize("name", golden.names())
def test_save_then_load_gives_the_tree_back(tmp_path, name):
    cfg, params = golden.params(name)
    hf.save(tmp_path, cfg, params, max_shard_bytes=20_000)
    got_cfg, got = hf.load(tmp_path)
    assert got_cfg == cfg
    assert_equal(got, params)


def test_shards_respect_their_size_and_are_indexed(tmp_path):
    cfg, params = golden.params("llama_untied")
    hf.save(tmp_path, cfg, params, max_shard_bytes=30_000)
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in read_all(tmp_path).values())
    for name in files:
        content = safetensors.numpy.load_file(tmp_path / name)
        assert sum(value.nbytes for value in content.values()) <= 30_000
        assert {key for key, file in index["weight_map"].items() if file == name} == set(content)
        with safetensors.safe_open(tmp_path / name, "numpy") as handle:
            assert handle.metadata() == {"format": "pt"}


@pytest.mark.parametrize("sizes", [(1 << 30, 20_000), (20_000, 1 << 30), (20_000, 40_000)])
def test_a_second_export_replaces_the_first(tmp_path, sizes):
    cfg, params = golden.params("llama_tied")
    hf.save(tmp_path, cfg, params, max_shard_bytes=sizes[0])
    doubled = jax.tree.map(lambda leaf: leaf * 2, params)
    hf.save(tmp_path, cfg, doubled, max_shard_bytes=sizes[1])
    assert_equal(hf.load(tmp_path)[1], doubled)
    assert (tmp_path / "model.safetensors").exists() == (sizes[1] == 1 << 30)
    assert not list(tmp_path.glob("*.part"))


def test_a_head_equal_to_the_embedding_is_taken_as_tied(tmp_path):
    config, weights, _, _ = golden.load("llama_tied")
    extra = {"lm_head.weight": weights["model.embed_tokens.weight"]}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    tiny.write(tmp_path, config, weights | extra)
    assert_equal(hf.load(tmp_path)[1], golden.params("llama_tied")[1])


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_decoder_of_a_multimodal_gemma3(tmp_path, capsys, prefix):
    config, weights, _, _ = golden.load("gemma3")
    renamed = {prefix + key.removeprefix("model."): value for key, value in weights.items()}
    vision = ["vision_tower.encoder.layers.0.mlp.fc1.bias", "multi_modal_projector.mm_soft_emb_norm.weight"]
    seen = [name if prefix.startswith("language") else f"model.{name}" for name in vision]
    wrapper = {"model_type": "gemma3", "text_config": config, "vision_config": {}}
    tiny.write(tmp_path, wrapper, renamed | {name: np.ones(3, np.float32) for name in seen})
    cfg, params = hf.load(tmp_path)
    expected_cfg, expected = golden.params("gemma3")
    assert cfg == expected_cfg
    assert_equal(params, expected)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "the 2 tensors that see images are left out" in printed.err
    assert printed.err.count("\n") == 1
