"""PEFT folders: what PEFT computes is what we compute, and what is read is written back byte for byte."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest

from molora_jax.adapters import adapter as adapters
from molora_jax.checkpoints import hf, peft, peft_config, peft_names, peft_plan
from molora_jax.models import families, transformer
from molora_jax.nn.layout import dense
from tests import golden
from tests.checkpoints import peft_files
from tests.checkpoints.test_hf import assert_equal, unstack
from tests.numerics import assert_close

CASES = json.loads((peft_files.FOLDER / "matching.json").read_text())


def logits(cfg, params, tokens):
    hidden = transformer.apply(cfg, params, tokens, dense(1, len(tokens))).hidden
    return transformer.logits(cfg, params, hidden)


def load(name, **kwargs):
    cfg, params = golden.params(peft_files.logits(name)[0])
    return cfg, params, *peft.load(peft_files.FOLDER / name, cfg, **kwargs)


@pytest.mark.parametrize("name", peft_files.names())
def test_merged_logits_are_those_of_peft(name):
    cfg, params, adapter, report = load(name)
    _, tokens, expected = peft_files.logits(name)
    assert report.missing == report.unused == report.notes == ()
    merged_cfg, merged = adapters.merge(cfg, params, adapter)
    assert_close(logits(merged_cfg, merged, tokens), expected, "model")
    assert np.abs(np.asarray(logits(cfg, params, tokens)) - expected).max() > 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("name", peft_files.names())
def test_a_list_of_layers_merges_to_the_same_bits(name):
    cfg, params, adapter, _ = load(name)
    stacked_cfg, stacked = adapters.merge(cfg, params, adapter)
    listed_cfg, listed = adapters.merge(cfg, unstack(params), adapter)
    assert listed_cfg == stacked_cfg
    assert_equal(listed, unstack(stacked))


@pytest.mark.parametrize("name", peft_files.names())
def test_export_after_import_is_byte_identical(tmp_path, name):
    cfg, _, adapter, _ = load(name)
    peft.save(tmp_path / "out", cfg, adapter)
    for file in (peft.CONFIG, peft.WEIGHTS):
        assert (tmp_path / "out" / file).read_bytes() == (peft_files.FOLDER / name / file).read_bytes()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [peft.CONFIG, peft.WEIGHTS]


@pytest.mark.parametrize("name", peft_files.names())
def test_a_config_made_from_the_tensors_alone_says_the_same(tmp_path, name):
    cfg, _, adapter, before = load(name)
    peft.save(tmp_path, cfg, dataclasses.replace(adapter, origin={}))
    again, report = peft.load(tmp_path, cfg)
    assert report.sites == before.sites
    assert set(report.whole) == set(before.whole)
    assert peft_files.read(tmp_path)[1].keys() == peft_files.read(peft_files.FOLDER / name)[1].keys()
    for path, layer, weights in adapter.weights():
        assert again.sites[path][layer].scale == weights.scale


def test_trained_biases_of_some_modules_are_expressed():
    cfg, _, adapter, _ = load("biases")
    assert {path[-1] for path in adapter.base} == {"bias"}
    assert len(adapter.base) == 7


@pytest.mark.parametrize("case", CASES[1:], ids=range(len(CASES) - 1))
def test_modules_ranks_and_scales_are_those_that_peft_chooses(case):
    cfg = families.from_hf({"max_position_embeddings": 8} | CASES[0]["base"])
    known = peft_names.modules(cfg)
    problems = []
    config = peft_config.parse({"peft_type": "LORA"} | case["config"], "", lambda *args: problems.append(args))
    names = lambda module: (module.name,)
    sites = {}
    for key in peft_plan.targeted(config, cfg, known, names):
        rank, alpha = peft_config.rank(config, names(known[key])), peft_config.alpha(config, names(known[key]))
        sites[known[key].name] = [rank, alpha, adapters.lora.scaling(alpha, rank, rslora=config.use_rslora)]
    assert sites == case["sites"]
    saved = {known[key].name for key in peft_plan.saved(config, cfg, known, names)}
    outer = tuple(f"{name}." for name in case["saved"])
    assert saved == {module.name for module in known.values() if f"{module.name}.".startswith(outer)}
    assert not problems


def test_gemma_embeddings_are_adapted_before_they_are_scaled():
    cfg, params, adapter, _ = load("embedding_scaled")
    _, merged = adapters.merge(cfg, params, adapter)
    weights = adapter.sites[adapters.EMBED][0]
    assert cfg.embed_scale != 1
    expected = golden.load("gemma3")[1]["model.embed_tokens.weight"] + weights.scale * (weights.b @ weights.a).T
    np.testing.assert_allclose(merged["embed"]["weight"], expected, rtol=1e-5, atol=1e-5)


def test_merging_into_a_tied_head_unties_it(tmp_path):
    cfg, params, adapter, _ = load("saved_head")
    assert cfg.tied
    merged_cfg, merged = adapters.merge(cfg, params, adapter)
    assert not merged_cfg.tied
    np.testing.assert_array_equal(merged["embed"]["weight"], params["embed"]["weight"])
    hf.save(tmp_path, merged_cfg, merged)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    _, tokens, expected = peft_files.logits("saved_head")
    assert_close(logits(*hf.load(tmp_path), tokens), expected, "model")


def test_an_adapter_that_keeps_both_ends_equal_keeps_the_model_tied():
    cfg, params, adapter, _ = load("tied")
    merged_cfg, merged = adapters.merge(cfg, params, adapter)
    assert merged_cfg == cfg
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    head, embed = adapter.sites[adapters.HEAD][0], adapter.sites[adapters.EMBED][0]
    np.testing.assert_array_equal(head.a, embed.b.T)


def test_embeddings_saved_beside_an_adapter_of_other_modules_are_the_bases_own(tmp_path):
    cfg, params = golden.params("llama_tied")
    config, tensors = peft_files.small()
    table = np.asarray(params["embed"]["weight"]) * 2
    tensors["base_model.model.model.embed_tokens.weight"] = table
    adapter, report = peft.load(peft_files.write(tmp_path / "x", config, tensors), cfg)
    assert report.whole == ("base_model.model.model.embed_tokens.weight",)
    merged_cfg, merged = adapters.merge(cfg, params, adapter)
    assert merged_cfg.tied
    np.testing.assert_array_equal(merged["embed"]["weight"], table)
    peft.save(tmp_path / "out", cfg, adapter)
    assert peft_files.read(tmp_path / "out")[1].keys() == tensors.keys()


def test_file_dtypes_are_kept_or_cast_as_asked(tmp_path):
    cfg, _, adapter, report = load("bfloat16")
    assert {weights.a.dtype for _, _, weights in adapter.weights()} == {np.dtype(ml_dtypes.bfloat16)}
    assert {dtype for *_, dtype in report.sites.values()} == {"bfloat16"}
    _, _, wide, _ = load("bfloat16", dtype=np.float32)
    for (_, _, left), (_, _, right) in zip(adapter.weights(), wide.weights(), strict=True):
        assert right.b.dtype == np.float32
        np.testing.assert_array_equal(left.b.astype(np.float32), right.b)
    peft.save(tmp_path, cfg, wide)
    assert {value.dtype.name for value in peft_files.read(tmp_path)[1].values()} == {"float32"}


def test_columns_have_an_entry_for_every_layer():
    cfg, _, adapter, report = load("layers")
    (path,) = adapter.sites
    assert path == ("layers", "attn", "k_proj")
    assert [weights is None for weights in adapter.sites[path]] == [False, True, False]
    assert list(report.sites) == ["model.layers.0.self_attn.k_proj", "model.layers.2.self_attn.k_proj"]
    _, _, regex, _ = load("regex")
    assert [weights is None for weights in regex.sites["layers", "attn", "k_proj"]] == [False, True]
    assert [weights.rank for weights in load("patterns")[2].sites["layers", "attn", "v_proj"]] == [1, 4, 1]


def test_the_report_is_a_table():
    text = str(load("embeddings")[3])
    assert "4 modules adapted, 2 tensors replaced" in text
    assert "lm_head                          rank 2    alpha 6      scale 4.243    float32" in text
    assert "whole: base_model.model.model.embed_tokens.base_layer.weight" in text
