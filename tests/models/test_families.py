"""Configs and weight names of every family, against what transformers reads and writes."""

import dataclasses

import jax
import numpy as np
import pytest
import transformers

from molora_jax.config import UserError
from molora_jax.models import families, transformer
from tests import golden

LLAMA = dict(
    model_type="llama",
    vocab_size=97,
    num_hidden_layers=2,
    hidden_size=36,
    intermediate_size=44,
    num_attention_heads=6,
    num_key_value_heads=2,
)


def test_every_family_has_a_golden():
    assert {golden.load(name)[0]["model_type"] for name in golden.names()} == set(families.FAMILIES)


@pytest.mark.parametrize("name", golden.names())
def test_config_survives_the_round_trip_and_hashes_equal(name):
    cfg = families.from_hf(golden.load(name)[0])
    again = families.from_hf(families.to_hf(cfg))
    assert again == cfg
    assert hash(again) == hash(cfg)


@pytest.mark.parametrize("name", golden.names())
def test_config_of_the_hub_and_config_saved_by_transformers_read_the_same(name):
    assert families.from_hf(golden.saved_config(name)) == families.from_hf(golden.load(name)[0])


@pytest.mark.parametrize("name", golden.names())
def test_transformers_reads_a_written_config_as_the_original(name):
    hf = golden.load(name)[0]
    ours = transformers.AutoConfig.for_model(**families.to_hf(families.from_hf(hf))).to_dict()
    theirs = transformers.AutoConfig.for_model(**hf).to_dict()
    assert families.from_hf(ours) == families.from_hf(theirs)
    theirs["rope_parameters"].pop("type", None)  # old name of rope_type
    repeated = {"architectures", "head_dim", "max_window_layers", "sliding_window_pattern"}
    assert {k: ours[k] for k in theirs.keys() - repeated} == {k: theirs[k] for k in theirs.keys() - repeated}


@pytest.mark.parametrize("name", golden.names())
def test_tree_uses_every_weight_once_with_its_shape(name):
    _, weights, _, _ = golden.load(name)
    cfg, params = golden.params(name)
    used = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        key = families.hf_name(cfg, tuple(entry.key for entry in path))
        layers = [(key.format(i), leaf[i]) for i in range(cfg.layers)] if "{}" in key else [(key, leaf)]
        assert not used.keys() & dict(layers).keys()
        used |= dict(layers)
    assert used.keys() == weights.keys()
    for key, value in weights.items():
        np.testing.assert_array_equal(used[key], value, err_msg=key)
    shapes = jax.tree.map(lambda leaf: leaf.shape, params)
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, transformer.abstract(cfg))


def test_configs_that_differ_hash_apart():
    configs = {families.from_hf(golden.load(name)[0]) for name in golden.names()}
    assert len(configs) == len(golden.names())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(model_type="mamba"), "got model_type 'mamba', expected one of llama, mistral"),
        (dict(model_type=None), "got model_type None"),
        (dict(hidden_act="relu"), "got activation 'relu', expected one of silu"),
        (dict(rope_scaling={"rope_type": "yarn", "factor": 2.0}), "got rope type 'yarn', expected"),
        (dict(rope_scaling={"type": "dynamic", "factor": 2.0}), "got rope type 'dynamic', expected"),
        (dict(rope_scaling={"rope_type": "linear"}), "key 'factor' is missing"),
        (dict(rope_parameters={"partial_rotary_factor": 0.5}), "got partial_rotary_factor 0.5, expected 1"),
        (dict(num_key_value_heads=4), "6 query heads do not divide into 4 key/value heads"),
        (dict(num_key_value_heads=-2), "6 query heads do not divide into -2 key/value heads"),
        (dict(head_dim=7), "needs an even head width, got 7"),
        (dict(model_type="gemma3_text", final_logit_softcapping=30.0), "soft caps are not supported"),
        (dict(is_causal=False), "got a model that reads in both directions, expected one that reads from the left"),
        (dict(model_type="gemma3_text", use_bidirectional_attention=True), "reads in both directions"),
        (dict(model_type="qwen3", layer_types=["full_attention"]), "got 1 attention windows for 2 layers"),
    ],
)
def test_unsupported_config_gives_one_line(change, message):
    with pytest.raises(UserError) as error:
        families.from_hf(LLAMA | change)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", [k for k in LLAMA if k not in ("model_type", "num_key_value_heads")])
def test_missing_key_is_named_in_one_line(key):
    with pytest.raises(UserError, match=rf"^config: key '{key}' is missing, expected in the config\.json of a llama"):
        families.from_hf({k: v for k, v in LLAMA.items() if k != key})


@pytest.mark.parametrize("family", families.FAMILIES)
def test_absent_keys_take_the_defaults_of_transformers(family):
    hf = LLAMA | dict(model_type=family, hidden_size=64, num_attention_heads=32)
    del hf["num_key_value_heads"]
    assert families.from_hf(hf) == families.from_hf(transformers.AutoConfig.for_model(**hf).to_dict())


def test_text_decoder_of_an_image_model_is_read():
    text = dict(hidden_size=48, num_hidden_layers=7, rope_scaling={"rope_type": "linear", "factor": 8.0})
    images = transformers.AutoConfig.for_model("gemma3", text_config=text).to_dict()
    alone = transformers.AutoConfig.for_model("gemma3_text", **text).to_dict()
    short = dict(model_type="gemma3", text_config=text)
    assert families.from_hf(short) == families.from_hf(images) == families.from_hf(alone)


def test_config_that_the_family_cannot_write_down_gives_one_line():
    cfg = families.from_hf(LLAMA | dict(model_type="mistral", sliding_window=8))
    with pytest.raises(
        UserError, match=r"^config: got windows=\(8, 0\), but a mistral config\.json can only say \(8, 8\)$"
    ):
        families.to_hf(dataclasses.replace(cfg, windows=(8, 0)))
