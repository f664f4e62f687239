"""GGUF files become HF folders with the weights, the configuration and the vocabulary they hold."""

import json
import math
import os
import pathlib

import gguf as gguf_py
import jax
import ml_dtypes
import numpy as np
import pytest

from molora_jax.checkpoints import gguf, gguf_tokenizer, hf
from molora_jax.config import Rope, UserError
from molora_jax.models import families
from molora_jax.text.tokenizer import Tokenizer
from tests import golden
from tests.checkpoints import tiny
from tests.checkpoints.test_hf import assert_equal, read_all


def convert(tmp_path: pathlib.Path, *args, **kwargs) -> pathlib.Path:
    tiny.gguf_file(tmp_path / "tiny.gguf", *args, **kwargs)
    gguf.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    return tmp_path / "out"


def refused(tmp_path: pathlib.Path, *args, **kwargs) -> str:
    """The one line that converting ends in; nothing is left on disk."""
    with pytest.raises(UserError) as caught:
        convert(tmp_path, *args, **kwargs)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
    return str(caught.value)


def expand(raw: bytes, kind: str, shape: tuple[int, int]) -> np.ndarray:
    """ggml's block formats, one number at a time: 32 share an fp16 scale d and, in the _1 kinds, a minimum m."""
    size = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}[kind]
    out = []
    for at in range(0, len(raw), size):
        block = raw[at : at + size]
        d = np.float32(np.frombuffer(block[:2], np.float16)[0])
        has_min = kind.endswith("_1")
        m = np.float32(np.frombuffer(block[2:4], np.float16)[0]) if has_min else np.float32(0)
        body = block[4 if has_min else 2 :]
        high = int.from_bytes(body[:4], "little") if kind.startswith("Q5") else 0
        nibbles = body[4:] if kind.startswith("Q5") else body
        for i in range(32):
            if kind == "Q8_0":
                out.append(d * np.float32(np.int8(body[i] - 256 if body[i] > 127 else body[i])))
                continue
            low = nibbles[i] & 15 if i < 16 else nibbles[i - 16] >> 4
            q = low | (high >> i & 1) << 4
            offset = {"Q4_0": 8, "Q5_0": 16}.get(kind, 0)
            out.append(d * np.float32(q - offset) + m)
    return np.array(out, np.float32).reshape(shape)


@pytest.mark.parametrize("name", ["llama_untied", "llama_bias", "mistral_window", "qwen2", "qwen3", "gemma3"])
def test_every_architecture_in_fp32_gives_its_weights_back(tmp_path, name):
    config, weights, _, _ = golden.load(name)
    config = config | {"head_dim": config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])}
    folder = convert(tmp_path, config, weights)
    cfg, params = hf.load(folder)
    expected_cfg, expected = golden.params(name)
    if name == "gemma3":  # w + 1 - 1 in fp32
        for norm in ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm"):
            expected["layers"][norm]["weight"] = (expected["layers"][norm]["weight"] + 1) - 1
        for norm in ("q_norm", "k_norm"):
            expected["layers"]["attn"][norm]["weight"] = (expected["layers"]["attn"][norm]["weight"] + 1) - 1
        expected["norm"]["weight"] = (expected["norm"]["weight"] + 1) - 1
        # A GGUF has no query_pre_attn_scalar: only the 27B model has another one than the head width.
        assert cfg.attn_scale == cfg.head_width**-0.5
        assert cfg.windows == (6, 6, 6, 6, 6, 0, 6)
    elif name == "mistral_window":  # a Llama to llama.cpp, which gives it no window
        assert (cfg.family, cfg.windows) == ("llama", (0, 0))
    else:
        assert cfg == expected_cfg
    assert_equal(params, expected)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"])
def test_every_kind_of_number(tmp_path, kind):
    config, weights = tiny.llama()
    written = read_all(convert(tmp_path, config, weights, kind))
    assert set(written) == set(weights)
    reordered = {"q_proj": 4, "k_proj": 2}
    for name, value in weights.items():
        stored = value
        for projection, heads in reordered.items():
            stored = tiny.permute(value, heads) if projection in name else stored
        if value.ndim == 1 or kind == "F32":
            expected = stored
        elif kind in ("F16", "BF16"):
            expected = stored.astype(np.float16 if kind == "F16" else ml_dtypes.bfloat16).astype(np.float32)
        else:
            raw = gguf_py.quants.quantize(stored, gguf_py.GGMLQuantizationType[kind]).tobytes()
            expected = expand(raw, kind, stored.shape)
            assert 0 < np.abs(expected - stored).max() < 1
        got = written[name]
        for projection, heads in reordered.items():
            got = tiny.permute(got, heads) if projection in name else got
        np.testing.assert_array_equal(got, expected, strict=True)


@pytest.mark.parametrize(("heads", "width", "tail"), [(1, 2, ()), (3, 6, ()), (5, 10, (7,)), (2, 16, (3,))])
def test_unpermute_inverts_a_row_by_row_loop(heads, width, tail):
    weight = np.random.default_rng(0).standard_normal((heads * width, *tail))
    np.testing.assert_array_equal(gguf.unpermute(tiny.permute(weight, heads), heads), weight)


def test_the_folder_is_complete(tmp_path):
    folder = convert(tmp_path, *tiny.llama(), "Q8_0")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 500.0)  # not the nearest float32
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "eos_token_id": [260, 261],
        "bos_token_id": 259,
    }
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.prefix) == (259, (260, 261), ())
    assert tokenizer.chat_template.endswith("{% endfor %}")
    assert tokenizer.backend.encode("hello<tool><|eot|>").tokens == ["hell", "o", "<tool>", "<|eot|>"]
    names = {path.name for path in folder.iterdir()}
    assert names == {"model.safetensors", "tokenizer.json"} | {
        f"{name}.json" for name in ("config", "tokenizer_config", "generation_config")
    }


def llama3_divisors(theta: float, width: int, factor: float) -> np.ndarray:
    """The Llama 3.1 release, one frequency at a time."""
    out = []
    for i in range(0, width, 2):
        wavelength = 2 * math.pi * theta ** (i / width)
        smooth = (8192 / wavelength - 1) / 3
        out.append(1.0 if smooth > 1 else factor if smooth < 0 else 1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_divisors_become_a_rope_scaling(tmp_path, factor):
    config, weights = tiny.llama(rope_theta=500_000.0)
    divisors = llama3_divisors(500_000.0, 16, factor)
    assert len(set(divisors)) > 2
    folder = convert(tmp_path, config, weights, extra={"rope_freqs.weight": divisors})
    expected = Rope(theta=500_000.0, scaling="llama3", factor=factor, high_freq_factor=4.0, original_positions=8192)
    assert hf.load(folder)[0].rope == expected


def test_linear_rope_scaling_spares_the_windowed_layers(tmp_path):
    config, weights, _, _ = golden.load("gemma3")
    meta = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    cfg, _ = hf.load(convert(tmp_path, config, weights, meta=meta))
    assert cfg.rope == Rope(theta=5000.0, scaling="linear", factor=8.0)
    assert cfg.local_rope == Rope(theta=10_000.0)


@pytest.mark.parametrize(
    ("meta", "rope"),
    [
        ({"rope.scale_linear": 4.0}, Rope(theta=500.0, scaling="linear", factor=4.0)),
        ({"rope.scaling.factor": 4.0}, Rope(theta=500.0, scaling="linear", factor=4.0)),
        ({"rope.scaling.factor": 1.0}, Rope(theta=500.0)),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, Rope(theta=500.0)),
    ],
)
def test_older_files_name_no_kind_of_scaling_and_mean_linear(tmp_path, meta, rope):
    config, weights = tiny.llama(rope_theta=500.0)
    found = hf.load(convert(tmp_path, config, weights, meta={f"llama.{key}": value for key, value in meta.items()}))
    assert found[0].rope == rope


def test_gemma_keeps_what_newer_files_state(tmp_path):
    config, weights, _, _ = golden.load("gemma3")
    meta = {
        "gemma3.rope.freq_base_swa": 50.0,
        "gemma3.attention.sliding_window_pattern": [True, False, True, True, True, True, False],
    }
    cfg, _ = hf.load(convert(tmp_path, config, weights, meta=meta))
    assert cfg.local_rope == Rope(theta=50.0)
    assert cfg.windows == (6, 0, 6, 6, 6, 6, 0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"meta": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}}, "rope type 'yarn'"),
        ({"meta": {"llama.expert_count": 8}}, "got a mixture of 8 experts"),
        ({"meta": {"llama.attention.head_count_kv": [1, 2]}}, "head_count_kv for every layer"),
        ({"meta": {"llama.attention.value_length": 8}}, "value_length=8, expected the head width 16"),
        ({"meta": {"llama.block_count": None}}, "'llama.block_count' is missing"),
        (
            {"meta": {"llama.feed_forward_length": 96}},
            "got shape (32, 64) for blk.0.ffn_down.weight, expected (32, 96)",
        ),
        ({"meta": {"general.architecture": "mamba"}}, "got architecture 'mamba', expected one of llama, qwen2"),
        ({"meta": {"tokenizer.ggml.tokens": None}}, "without tokenizer.ggml.tokens"),
        (
            {"extra": {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}},
            "rope_freqs.weight of an unknown kind",
        ),
        ({"extra": {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}}, "no llama decoder has: blk.0.attn_sinks"),
        ({"drop": ["blk.1.ffn_up.weight"]}, "got no tensor blk.1.ffn_up.weight"),
        ({"drop": ["token_embd.weight"]}, "'token_embd.weight' is missing"),
    ],
)
def test_what_is_not_supported_ends_in_one_line(tmp_path, changes, expected):
    assert expected in refused(tmp_path, *tiny.llama(), **changes)


def test_numbers_that_cannot_be_expanded(tmp_path, monkeypatch):
    def unknown(*_):
        raise NotImplementedError

    monkeypatch.setattr(gguf_py.quants, "dequantize", unknown)
    assert "which cannot be expanded" in refused(tmp_path, *tiny.llama(), "Q8_0")


@pytest.mark.parametrize("keep", [0, 3, 20, 200, 3000, 0.5, -1])
def test_a_file_cut_short(tmp_path, keep):
    file = tmp_path / "tiny.gguf"
    tiny.gguf_file(file, *tiny.llama(), "Q8_0")
    size = file.stat().st_size
    os.truncate(file, int(size * keep) if 0 < keep < 1 else keep if keep >= 0 else size - 40)
    with pytest.raises(UserError, match=r"tiny\.gguf: got no whole GGUF file \(.*\); download it again"):
        gguf.convert(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_foreign_file_and_none(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(UserError, match="got no whole GGUF file"):
        gguf.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    with pytest.raises(UserError, match="got no such file"):
        gguf.convert(tmp_path / "other.gguf", tmp_path / "out")


def test_an_existing_folder_is_not_touched(tmp_path):
    tiny.gguf_file(tmp_path / "tiny.gguf", *tiny.llama())
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="got a folder that exists"):
        gguf.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_tokenizer, "build", interrupted)
    tiny.gguf_file(tmp_path / "tiny.gguf", *tiny.llama())
    with pytest.raises(KeyboardInterrupt):
        gguf.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_the_config_is_the_one_of_the_tensors(tmp_path):
    config, weights = tiny.llama()
    folder = convert(tmp_path, config, weights)
    assert families.from_hf(json.loads((folder / "config.json").read_text())) == families.from_hf(config)
    assert sum(leaf.size for leaf in jax.tree.leaves(hf.load(folder)[1])) == sum(w.size for w in weights.values())
