"""PEFT folders that are wrong or ambiguous: each ends in one line, or is read as what it must mean."""

import numpy as np
import pytest
import safetensors.numpy

from molora_jax.checkpoints import peft
from molora_jax.config import UserError
from tests import golden
from tests.checkpoints import peft_files
from tests.checkpoints.peft_files import Q_PATH, V_PATH, Q, V, assert_same, load, refused, refused_then_allowed


@pytest.fixture(scope="module")
def cfg():
    return golden.params("llama_tied")[0]


def test_a_missing_tensor(tmp_path, cfg):
    config, tensors = peft_files.small()
    gone = f"{V.format(1)}.lora_B.weight"
    part = {key: value for key, value in tensors.items() if key != gone}
    line, adapter, report = refused_then_allowed(tmp_path, cfg, config, part, "missing")
    assert f"got no {gone}" in line
    assert report.missing == (gone,)
    assert_same(adapter, tensors, skip=[(V_PATH, 1)])
    peft.save(tmp_path / "out", cfg, adapter)
    assert len(peft.load(tmp_path / "out", cfg)[1].sites) == 3  # the config follows the tensors


def test_nothing_whole(tmp_path, cfg):
    config, tensors = peft_files.small()
    halves = {key: value for key, value in tensors.items() if "lora_A" in key}
    assert "nothing would be adapted" in refused(tmp_path, cfg, config, halves, allow={"missing"})


def test_a_layer_too_many(tmp_path, cfg):
    config, tensors = peft_files.small()
    extra = f"{Q.format(9)}.lora_A.weight"
    more = tensors | {extra: tensors[f"{Q.format(0)}.lora_A.weight"]}
    line, adapter, report = refused_then_allowed(tmp_path, cfg, config, more, "unused")
    assert f"got {extra}, which" in line
    assert report.unused == (extra,)
    assert_same(adapter, tensors)


@pytest.mark.parametrize(
    "extra",
    [
        f"{Q.format(0)}.lora_magnitude_vector",  # without use_dora
        f"{Q.format(0)}.lora_B.bias",  # without lora_bias
        "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight",  # not targeted
        "base_model.model.model.layers.0.input_layernorm.weight",  # not in modules_to_save
        "base_model.model.score.weight",
        f"{Q.format(0)}.lora_embedding_A",
        "base_model.model.model.embed_tokens.lora_A.weight",
        f"{Q.format(0)}.base_layer.bias",  # the model has none
        f"{Q.format(0)}.lora_E",
    ],
)
def test_a_tensor_without_a_place(tmp_path, cfg, extra):
    config, tensors = peft_files.small()
    line, adapter, _ = refused_then_allowed(tmp_path, cfg, config, tensors | {extra: np.ones(36, np.float32)}, "unused")
    assert extra in line
    assert_same(adapter, tensors)


def test_a_target_that_the_model_has_not(tmp_path, cfg):
    config, tensors = peft_files.small(target_modules=["q_proj", "v_proj", "w1", "proj"])
    line, adapter, _ = refused_then_allowed(tmp_path, cfg, config, tensors, "targets")
    assert (
        "got target_modules 'w1', target_modules 'proj' in the config, which no module of the decoder matches" in line
    )
    assert_same(adapter, tensors)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(target_modules="auto"), "target_modules 'auto'"),
        (dict(target_modules="q_proj"), "target_modules 'q_proj'"),  # a string is a pattern for the whole name
        (dict(layers_to_transform=[0, 1, 2]), "layers_to_transform 2"),
        (dict(modules_to_save=["score"]), "modules_to_save 'score'"),
    ],
)
def test_other_names_that_the_model_has_not(tmp_path, cfg, changes, expected):
    config, tensors = peft_files.small(**changes)
    assert expected in refused(tmp_path, cfg, config, tensors)


@pytest.mark.parametrize("key", ["alpha_pattern", "rank_pattern"])
@pytest.mark.parametrize("pattern", ["q_porj", "attn.q_proj", "k_proj", "layers.2.self_attn.q_proj"])
def test_a_pattern_that_matches_nothing(tmp_path, cfg, key, pattern):
    config, tensors = peft_files.small(**{key: {pattern: 100}})
    line, adapter, _ = refused_then_allowed(tmp_path, cfg, config, tensors, "patterns")
    assert f"got {key} {pattern!r}" in line
    assert_same(adapter, tensors)


def scales(tmp_path, cfg, ranks: dict[str, int], **changes) -> list[float]:
    """Scales at q of layers 0 and 1 and v of layer 0; `ranks` gives the rank of tensors whose name holds the key."""
    config, tensors = peft_files.small(**changes)
    for key, rank in ranks.items():
        for name in [name for name in tensors if key in name]:
            shape = (rank, 36) if "lora_A" in name else (tensors[name].shape[0], rank)
            tensors[name] = np.ones(shape, np.float32)
    sites = load(tmp_path, cfg, config, tensors)[0].sites
    return [sites[Q_PATH][0].scale, sites[Q_PATH][1].scale, sites[V_PATH][0].scale]


def test_rank_and_alpha_patterns_are_looked_up_independently(tmp_path, cfg):
    patterns = dict(rank_pattern={"q_proj": 16}, alpha_pattern={"layers.1.self_attn.q_proj": 64})
    assert scales(tmp_path, cfg, {"q_proj": 16}, **patterns) == [0.5, 4.0, 2.0]


def test_rslora_uses_the_square_root_of_each_modules_own_rank(tmp_path, cfg):
    one = "layers.1.self_attn.q_proj"
    patterns = dict(use_rslora=True, rank_pattern={one: 16}, alpha_pattern={one: 64})
    assert scales(tmp_path, cfg, {one: 16}, **patterns) == [4.0, 16.0, 4.0]


def test_a_config_of_another_rank_names_both(tmp_path, cfg):
    config, tensors = peft_files.small(r=8)
    line = refused(tmp_path, cfg, config, tensors, allow={"missing", "unused"})
    assert "got shape (4, 36)" in line
    assert "its rank is 4, and 8 by r and rank_pattern of the config" in line


@pytest.mark.parametrize("letter", "AB")
def test_a_transposed_factor(tmp_path, cfg, letter):
    config, tensors = peft_files.small()
    name = f"{Q.format(0)}.lora_{letter}.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    assert f"for {name}, expected" in (line := refused(tmp_path, cfg, config, tensors))
    assert line.endswith("it is transposed")


def test_factors_of_another_base(tmp_path, cfg):
    config, tensors = peft_files.small()
    name = f"{V.format(0)}.lora_B.weight"
    tensors[name] = np.ones((36, 4), np.float32)  # as if keys and values had as many heads as queries
    assert "made for another base" in refused(tmp_path, cfg, config, tensors)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite(tmp_path, cfg, value):
    config, tensors = peft_files.small()
    name = f"{Q.format(1)}.lora_B.weight"
    tensors[name][3, 2] = value
    line, adapter, _ = refused_then_allowed(tmp_path, cfg, config, tensors, "nonfinite")
    assert f"got NaN or infinity in {name}" in line
    assert not np.isfinite(adapter.sites[Q_PATH][1].b).all()


def test_integers(tmp_path, cfg):
    config, tensors = peft_files.small()
    tensors[f"{Q.format(0)}.lora_A.weight"] = np.ones((4, 36), np.int8)
    assert "got dtype I8" in refused(tmp_path, cfg, config, tensors)


@pytest.mark.parametrize("value", [None, False, {}, [], ""])
def test_unknown_fields_without_a_value_are_ignored(tmp_path, cfg, value):
    config, tensors = peft_files.small(of_the_future=value)
    adapter, _ = load(tmp_path, cfg, config, tensors)
    peft.save(tmp_path / "out", cfg, adapter)
    assert peft_files.read(tmp_path / "out")[0] == config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("of_the_future", {"x": 1}),
        ("trainable_token_indices", [1, 2]),
        ("layer_replication", [[0, 2]]),
        ("target_parameters", ["mlp.experts"]),
        ("arrow_config", {"top_k": 1}),
        ("alora_invocation_tokens", [5]),
        ("use_qalora", True),
        ("kasa_config", {"beta": 1}),
        ("megatron_config", {"a": 1}),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
    ],
)
def test_fields_that_mean_something_unknown_are_not(tmp_path, cfg, key, value):
    config, tensors = peft_files.small(**{key: value})
    line, adapter, _ = refused_then_allowed(tmp_path, cfg, config, tensors, "config")
    assert f"got {key}={value!r}" in line
    assert_same(adapter, tensors)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(peft_type="LOHA"), "got peft_type 'LOHA', expected 'LORA'"),
        (dict(peft_type=None), "got peft_type None"),
        (dict(r="8"), "got r='8', expected a whole number"),
        (dict(r=0), "got r=0"),
        (dict(lora_alpha=None), "got lora_alpha=None, expected a number"),
        (dict(rank_pattern={"q_proj": 2.5}), "got rank_pattern={'q_proj': 2.5}"),
        (dict(alpha_pattern=[1]), "got alpha_pattern=[1]"),
        (dict(target_modules=None), "got no target_modules"),
        (dict(target_modules=[3]), "expected a list of names"),
        (dict(target_modules="(q_proj"), "which cannot be read"),
        (dict(rank_pattern={"(q_proj": 4}), "which cannot be read"),
        (dict(target_modules=".*q_proj", layers_to_transform=[0]), "got layers_to_transform beside a pattern"),
        (dict(layers_to_transform="0"), "expected a layer or a list of layers"),
        (dict(bias="some"), "got bias='some'"),
        (dict(use_dora=True, lora_bias=True), "got use_dora and lora_bias"),
    ],
)
def test_a_config_that_cannot_be(tmp_path, cfg, changes, expected):
    config, tensors = peft_files.small(**changes)
    assert expected in refused(tmp_path, cfg, config, tensors)


def test_folders_that_cannot_be(tmp_path, cfg):
    config, tensors = peft_files.small()
    with pytest.raises(UserError, match="got no such folder"):
        peft.load(tmp_path / "none", cfg)
    folder = peft_files.write(tmp_path / "x", config, tensors)
    (folder / peft.WEIGHTS).unlink()
    with pytest.raises(UserError, match="got a folder without weights"):
        peft.load(folder, cfg)
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(UserError, match=r"got adapter_model\.bin, a pickle, which is never loaded.*save_pretrained"):
        peft.load(folder, cfg)
    (folder / peft.WEIGHTS).write_bytes(safetensors.numpy.save(tensors)[:-5])
    with pytest.raises(UserError, match="got no whole safetensors file"):
        peft.load(folder, cfg)
    for text, expected in (("{", "got no JSON"), ("[]", "got a JSON list, expected an object")):
        (folder / peft.CONFIG).write_text(text)
        with pytest.raises(UserError, match=expected):
            peft.load(folder, cfg)
    (folder / peft.CONFIG).unlink()
    with pytest.raises(UserError, match="expected the config of a PEFT adapter"):
        peft.load(folder, cfg)
    with pytest.raises(UserError, match=r"got allow=\['everything'\], expected some of missing, unused"):
        peft.load(folder, cfg, allow={"everything"})


def test_another_vocabulary(tmp_path):
    config, tensors = peft_files.read(peft_files.FOLDER / "embeddings")
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    tensors[name] = np.ones((98, 36), np.float32)
    line = refused(tmp_path, golden.params("llama_tied")[0], config, tensors)
    assert f"got shape (98, 36) for {name}, expected (97, 36): the adapter was made for another base" in line


def test_a_saved_module_or_bias_that_is_not_there(tmp_path):
    for name, gone in (("saved", "base_model.model.lm_head.weight"), ("biases", f"{Q.format(1)}.base_layer.bias")):
        config, tensors = peft_files.read(peft_files.FOLDER / name)
        del tensors[gone]
        cfg = golden.params(peft_files.logits(name)[0])[0]
        assert f"got no {gone}" in refused(tmp_path, cfg, config, tensors)


def test_trained_biases_under_either_name(tmp_path):
    config, tensors = peft_files.read(peft_files.FOLDER / "biases")
    plain = {key.replace("base_layer.bias", "bias"): value for key, value in tensors.items()}
    cfg = golden.params("llama_bias")[0]
    adapter, _ = load(tmp_path, cfg, config, plain)
    peft.save(tmp_path / "out", cfg, adapter)
    assert peft_files.read(tmp_path / "out")[1].keys() == tensors.keys()
    both = tensors | {f"{Q.format(0)}.bias": tensors[f"{Q.format(0)}.base_layer.bias"]}
    assert "got both" in refused(tmp_path, cfg, config, both)
