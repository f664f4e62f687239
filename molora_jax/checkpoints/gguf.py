"""GGUF files of llama.cpp, rewritten once as folders that `checkpoints.hf` loads."""

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np

from molora_jax.checkpoints import gguf_tokenizer, hf, tensors
from molora_jax.config import ModelConfig, Rope, UserError
from molora_jax.models import families, transformer
from molora_jax.nn import rope

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
_NAMES = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "q_proj": "blk.{}.attn_q",
    "k_proj": "blk.{}.attn_k",
    "v_proj": "blk.{}.attn_v",
    "o_proj": "blk.{}.attn_output",
    "q_norm": "blk.{}.attn_q_norm",
    "k_norm": "blk.{}.attn_k_norm",
    "gate_proj": "blk.{}.ffn_gate",
    "up_proj": "blk.{}.ffn_up",
    "down_proj": "blk.{}.ffn_down",
    "attn_norm": "blk.{}.attn_norm",
    "mlp_norm": "blk.{}.ffn_norm",
    "attn_post_norm": "blk.{}.post_attention_norm",
    "mlp_post_norm": "blk.{}.post_ffw_norm",
}
_ROPE_FACTORS = "rope_freqs.weight"


class _Reader(gguf.GGUFReader):
    """Reads through a plain view of the mapped file: slices of `np.memmap` are several times slower."""

    @property
    def data(self) -> np.ndarray:
        return self._view

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._view = mapped.view(np.ndarray)


def convert(file: Path | str, folder: Path | str) -> None:
    """Writes the model and the tokenizer of a GGUF file as a HF folder: fp32 weights, `tokenizer.json`, configs.

    Quantised weights are expanded as llama.cpp expands them. Its two rewrites are undone: the rows of Llama's query
    and key projections, which it reorders for its rotary embedding, and the 1 it adds to Gemma's norms.
    `folder` appears only when it is complete.

    Raises:
      UserError: no GGUF file or a part of one, an architecture, vocabulary or rotary embedding that is not supported,
        tensors that do not fit the metadata, or a `folder` that is there already.
    """
    file, folder = Path(file), Path(folder)
    if folder.exists():
        raise UserError(f"{folder}: got a folder that exists, expected a new name for the converted {file.name}")
    reader = _open(file)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    stored = {tensor.name: tensor for tensor in reader.tensors}
    cfg = _config(meta, stored)
    sources = _sources(file, cfg, stored)
    tokenizer = gguf_tokenizer.build(meta)
    tokenizer_config, generation = gguf_tokenizer.configs(meta)
    config = families.to_hf(cfg) | generation | {"torch_dtype": "float32"}
    contents = {"config": config, "tokenizer_config": tokenizer_config, "generation_config": generation}
    part = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        tensors.write(part, sources, hf.MAX_SHARD_BYTES)
        tokenizer.save(str(part / "tokenizer.json"))
        for name, content in contents.items():
            (part / f"{name}.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _open(file: Path) -> gguf.GGUFReader:
    if not file.is_file():
        raise UserError(f"{file}: got no such file, expected a .gguf file")
    try:
        return _Reader(file)
    except (ValueError, IndexError, KeyError, OverflowError) as e:
        raise UserError(f"{file}: got no whole GGUF file ({e}); download it again") from None


def _config(meta: dict[str, Any], stored: dict[str, gguf.ReaderTensor]) -> ModelConfig:
    arch = meta.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UserError(f"GGUF: got architecture {arch!r}, expected one of {', '.join(ARCHITECTURES)}")
    if meta.get(f"{arch}.expert_count"):
        raise UserError(f"GGUF: got a mixture of {meta[f'{arch}.expert_count']} experts, expected a dense model")
    try:
        return families.from_hf(_hf_config(arch, meta, stored))
    except KeyError as e:
        raise UserError(f"GGUF: {e} is missing, expected in a {arch} file") from None


def _hf_config(arch: str, meta: dict[str, Any], stored: dict[str, gguf.ReaderTensor]) -> families.Json:
    def get(key: str, *default):
        value = meta.get(f"{arch}.{key}", *default) if default else meta[f"{arch}.{key}"]
        if isinstance(value, list):
            raise UserError(f"GGUF: got a {arch}.{key} for every layer, expected one for all layers")
        return value

    heads = get("attention.head_count")
    width = get("attention.key_length", get("embedding_length") // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, width) != width:
            raise UserError(f"GGUF: got {arch}.{key}={get(key)}, expected the head width {width}")
    config = dict(
        model_type=ARCHITECTURES[arch],
        vocab_size=int(stored["token_embd.weight"].shape[1]),
        num_hidden_layers=get("block_count"),
        hidden_size=get("embedding_length"),
        intermediate_size=get("feed_forward_length"),
        num_attention_heads=heads,
        num_key_value_heads=get("attention.head_count_kv", heads),
        head_dim=width,
        max_position_embeddings=get("context_length"),
        rms_norm_eps=_shortest(get("attention.layer_norm_rms_epsilon")),
        rope_theta=_shortest(get("rope.freq_base", 10_000.0)),
        tie_word_embeddings="output.weight" not in stored,
        attention_bias="blk.0.attn_output.bias" in stored,
        mlp_bias="blk.0.ffn_down.bias" in stored,
    )
    if arch == "gemma3":
        config |= _gemma3(config, meta)
    return config | {"rope_scaling": _rope_scaling(config, meta, stored)}


def _gemma3(config: families.Json, meta: dict[str, Any]) -> families.Json:
    """What llama.cpp knows about Gemma 3 without having it in the file: every sixth layer sees the whole context, and
    the 27B model (the one of 62 layers) scales its attention scores by the mean width of a head."""
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    pattern = meta.get("gemma3.attention.sliding_window_pattern", 6)
    windowed = pattern if isinstance(pattern, list) else [bool((i + 1) % pattern) for i in range(layers)]
    return dict(
        sliding_window=meta["gemma3.attention.sliding_window"],
        layer_types=["sliding_attention" if w else "full_attention" for w in windowed],
        query_pre_attn_scalar=config["hidden_size"] // heads if layers == 62 else config["head_dim"],
        rope_local_base_freq=_shortest(meta.get("gemma3.rope.freq_base_swa", 10_000.0)),
        final_logit_softcapping=meta.get("gemma3.final_logit_softcapping"),
    )


def _rope_scaling(config: families.Json, meta: dict[str, Any], stored) -> families.Json | None:
    arch = meta["general.architecture"]
    if _ROPE_FACTORS in stored:
        return _llama3(config, _values(stored[_ROPE_FACTORS]))
    # files older than the type have a factor alone, or one by its first name, and mean linear scaling
    factor = meta.get(f"{arch}.rope.scaling.factor") or meta.get(f"{arch}.rope.scale_linear")
    kind = meta.get(f"{arch}.rope.scaling.type", "linear" if factor not in (None, 1) else "none")
    if kind == "none":
        return None
    if factor is None:
        raise UserError(
            f"gguf: got rope.scaling.type {kind!r} without a factor, expected rope.scaling.factor beside it"
        )
    return {"rope_type": kind, "factor": _shortest(factor)}


def _llama3(config: families.Json, divisors: np.ndarray) -> families.Json | None:
    """The settings of Llama 3.1 and later that divide the rotary frequencies by `divisors`, [d/2].

    A GGUF holds only the divisors. All Llama 3 releases share the settings below and differ in the factor alone.
    """
    if np.all(divisors == 1.0):
        return None
    shared = dict(low_freq_factor=1.0, high_freq_factor=4.0)
    scaled = Rope(
        theta=config["rope_theta"], scaling="llama3", factor=float(divisors.max()), original_positions=8192, **shared
    )
    plain = Rope(theta=config["rope_theta"])
    expected = rope.frequencies(plain, config["head_dim"]) / rope.frequencies(scaled, config["head_dim"])
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise UserError(
            f"GGUF: got {_ROPE_FACTORS} of an unknown kind, expected the divisors of Llama 3's rope scaling"
        )
    return {"rope_type": "llama3", "factor": scaled.factor, "original_max_position_embeddings": 8192, **shared}


def _shortest(value: float) -> float:
    """The number that was meant: metadata are float32, and 1e-5 would read 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _sources(file: Path, cfg: ModelConfig, stored: dict[str, gguf.ReaderTensor]) -> dict[str, tensors.Source]:
    """Every tensor of the HF folder, by name, still to be expanded."""
    sources, used = {}, {_ROPE_FACTORS}
    for path, leaf in jax.tree_util.tree_leaves_with_path(transformer.abstract(cfg)):
        keys = tuple(key.key for key in path)
        layered = keys[0] == "layers"
        for i in range(cfg.layers if layered else 1):
            name = f"{_NAMES[keys[-2]]}.{keys[-1]}".format(i)
            shape = leaf.shape[1:] if layered else leaf.shape
            if name not in stored:
                raise UserError(f"{file}: got no tensor {name}, expected one in a {cfg.family} file")
            if (got := tuple(int(n) for n in reversed(stored[name].shape))) != shape:
                raise UserError(f"{file}: got shape {got} for {name}, expected {shape}")
            used.add(name)
            make = lambda keys=keys, name=name: _restore(cfg, keys, _values(stored[name]))
            sources[families.hf_name(cfg, keys).format(i)] = tensors.Source(shape, np.dtype(np.float32), make)
    if extra := sorted(set(stored) - used):
        raise UserError(f"{file}: got tensors that no {cfg.family} decoder has: {', '.join(extra[:3])}")
    return sources


def _values(tensor: gguf.ReaderTensor) -> np.ndarray:
    try:
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise UserError(f"GGUF: got {tensor.name} in {tensor.tensor_type.name}, which cannot be expanded") from None


def _restore(cfg: ModelConfig, keys: tuple[str, ...], values: np.ndarray) -> np.ndarray:
    if cfg.family == "llama" and keys[-2] in ("q_proj", "k_proj"):
        return unpermute(values, cfg.heads if keys[-2] == "q_proj" else cfg.kv_heads)
    return values - np.float32(cfg.norm_offset) if keys[-2].endswith("norm") else values


def unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Puts the rows of a projection back from pairs (i, i + 1) to halves (i, i + d/2) in every head: [H·d, ...].

    llama.cpp rotates neighbouring features where HF rotates the two halves of a head, and reorders Llama's rows to
    suit (its convert_hf_to_gguf.py, `permute`). Row h·d + 2j + s of `values` becomes row h·d + s·d/2 + j.
    """
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
