"""Names of the tensors of a PEFT file: prefixes and adapter names that other programs leave in them."""

import pytest

from molora_jax.checkpoints import peft
from tests import golden
from tests.checkpoints import peft_files
from tests.checkpoints.peft_files import assert_same, load, refused


@pytest.fixture(scope="module")
def cfg():
    return golden.params("llama_tied")[0]


@pytest.mark.parametrize(
    "prefix",
    ["base_model.model.", "", "model.", "base_model.model.model.language_model.", "_orig_mod.base_model.model.model."],
)
def test_another_prefix_is_read_and_noted(tmp_path, cfg, prefix):
    config, tensors = peft_files.small()
    renamed = {prefix + key.removeprefix("base_model.model.model."): value for key, value in tensors.items()}
    adapter, report = load(tmp_path, cfg, config, renamed)
    assert_same(adapter, tensors)
    assert f"names begin with {prefix!r}" in report.notes[0]
    peft.save(tmp_path / "out", cfg, adapter)
    assert peft_files.read(tmp_path / "out")[1].keys() == tensors.keys()


def test_another_prefix_serves_patterns_written_for_it(tmp_path, cfg):
    config, tensors = peft_files.small(target_modules=r"model\.language_model\.layers\.\d+\.self_attn\.[qv]_proj")
    renamed = {key.replace("model.layers", "model.language_model.layers"): value for key, value in tensors.items()}
    adapter, _ = load(tmp_path, cfg, config, renamed)
    assert_same(adapter, tensors)
    peft.save(tmp_path / "out", cfg, adapter)
    assert_same(peft.load(tmp_path / "out", cfg)[0], tensors)


def test_two_prefixes_are_ambiguous(tmp_path, cfg):
    config, tensors = peft_files.small()
    mixed = {key.replace("model.model.layers.1", "model.layers.1"): value for key, value in tensors.items()}
    assert "expected one prefix" in refused(tmp_path, cfg, config, mixed)


def test_a_foreign_network_with_layers_of_the_same_name_is_not_taken_for_the_decoder(tmp_path, cfg):
    config, tensors = peft_files.small()
    foreign = {key.replace("model.model.layers", "model.vision_tower.layers"): v for key, v in tensors.items()}
    line = refused(tmp_path, cfg, config, foreign)
    assert "got 8 tensors (such as base_model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight" in line
    assert "expected ones of a llama decoder with 2 layers" in line
    assert "got 8 tensors" in refused(tmp_path, cfg, config, foreign, allow={"unused", "missing", "targets"})
    line = refused(tmp_path, cfg, config, tensors | foreign)
    assert "vision_tower" in line
    assert "which the config or the decoder has no place for" in line


@pytest.mark.parametrize("name", ["default", "weight", "lora", "lora_A", "mlp", "x"])
def test_an_adapter_name_inside_the_names(tmp_path, cfg, name):
    config, tensors = peft_files.small()
    renamed = {key.replace(".weight", f".{name}.weight"): value for key, value in tensors.items()}
    assert_same(load(tmp_path, cfg, config, renamed)[0], tensors)


def test_two_adapters_in_one_file(tmp_path, cfg):
    config, tensors = peft_files.small()
    both = {key.replace(".weight", f".{name}.weight"): value for key, value in tensors.items() for name in "xy"}
    assert "got both" in refused(tmp_path, cfg, config, both)
    split = {key.replace(".weight", f".{'xy'['v_proj' in key]}.weight"): value for key, value in tensors.items()}
    assert "got adapters x, y in one file" in refused(tmp_path, cfg, config, split)


def test_an_adapter_name_inside_the_names_of_other_kinds(tmp_path, cfg):
    config, tensors = peft_files.read(peft_files.FOLDER / "embedding_dora")
    for suffix in ("", ".weight"):
        renamed = {}
        for key, value in tensors.items():
            key = key.replace("lora_magnitude_vector", f"lora_magnitude_vector.a{suffix}")
            for letter in "AB":
                key = key.replace(f"embedding_{letter}", f"embedding_{letter}.a")
            renamed[key.replace(".weight", ".a.weight") if ".lora_A." in key or ".lora_B." in key else key] = value
        qwen = golden.params("qwen2_window")[0]
        adapter, report = load(tmp_path, qwen, config, renamed)
        assert len(report.sites) == 3
        peft.save(tmp_path / "out", qwen, adapter)
        assert peft_files.read(tmp_path / "out")[1].keys() == tensors.keys()


@pytest.mark.parametrize("name", ["mlp", "x", "weight", "lora", "q_proj", "model.layers.0"])
def test_the_adapters_name_never_touches_the_tensors(tmp_path, cfg, name):
    config, tensors = peft_files.small()
    adapter, _ = load(tmp_path, cfg, config, tensors, name=name)
    assert adapter.name == name
    peft.save(tmp_path / "out", cfg, adapter)
    assert peft_files.read(tmp_path / "out")[1].keys() == tensors.keys()
