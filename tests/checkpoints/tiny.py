"""Tiny models written as HF folders and as GGUF files, without the code under test."""

import json
import pathlib

import gguf
import numpy as np
import safetensors.numpy
from tokenizers import pre_tokenizers

from tests import golden

ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "gemma3_text": "GEMMA3"}


def hf_folder(folder: pathlib.Path, name: str, dtype=np.float32, shards: int = 1) -> dict[str, np.ndarray]:
    """Writes a golden model; returns its tensors as they lie in the files."""
    config, weights, _, _ = golden.load(name)
    weights = {key: value.astype(dtype) for key, value in weights.items()}
    write(folder, config, weights, shards)
    return weights


def write(folder: pathlib.Path, config: dict, weights: dict[str, np.ndarray], shards: int = 1) -> None:
    """One file, or every `shards`-th tensor in each of `shards` files, with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        safetensors.numpy.save_file(weights, folder / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {key: names[i % shards] for i, key in enumerate(weights)}
    for name in names:
        part = {key: value for key, value in weights.items() if weight_map[key] == name}
        safetensors.numpy.save_file(part, folder / name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def llama(**changes) -> tuple[dict, dict[str, np.ndarray]]:
    """A Llama whose rows are multiples of 32, the block that GGUF quantises: config and random tensors by HF name."""
    config = dict(
        model_type="llama",
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_theta=500.0,
        tie_word_embeddings=True,
    )
    config |= changes
    rng, q, kv = np.random.default_rng(0), 4 * 16, 2 * 16
    shapes = {"model.embed_tokens": (300, 32), "model.norm": (32,)}
    for i in range(2):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.input_layernorm": (32,), f"{layer}.post_attention_layernorm": (32,)}
        shapes |= {f"{layer}.self_attn.q_proj": (q, 32), f"{layer}.self_attn.k_proj": (kv, 32)}
        shapes |= {f"{layer}.self_attn.v_proj": (kv, 32), f"{layer}.self_attn.o_proj": (32, q)}
        shapes |= {f"{layer}.mlp.gate_proj": (64, 32), f"{layer}.mlp.up_proj": (64, 32)}
        shapes |= {f"{layer}.mlp.down_proj": (32, 64)}
    return config, {f"{k}.weight": rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows, one row at a time: halves (j, j + d/2) of a head become neighbours."""
    out, width = np.empty_like(weight), weight.shape[0] // heads
    for head in range(heads):
        for j in range(width // 2):
            for side in range(2):
                out[head * width + 2 * j + side] = weight[head * width + side * (width // 2) + j]
    return out


def gguf_file(
    file: pathlib.Path, config: dict, weights: dict[str, np.ndarray], kind="F32", meta=None, extra=None, drop=()
) -> None:
    """Writes a GGUF as llama.cpp's converter does: matrices in `kind`, vectors in F32.

    Args:
      meta: further metadata, or other values for those written anyway; None leaves one out.
      extra: further tensors, by GGUF name.
      drop: GGUF names of tensors to leave out.
    """
    arch = ARCHITECTURES[config["model_type"]]
    short, heads = arch.lower(), config["num_attention_heads"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], config["num_hidden_layers"])
    tensors = dict(extra or {})
    for key, value in weights.items():
        if arch == "LLAMA" and (".q_proj." in key or ".k_proj." in key):
            value = permute(value, heads if ".q_proj." in key else config["num_key_value_heads"])
        if arch == "GEMMA3" and key.endswith("norm.weight"):
            value = value + np.float32(1)
        tensors[names.get_name(key, try_suffixes=(".weight", ".bias"))] = value
    writer = gguf.GGUFWriter(file, short)
    for key, value in (_metadata(short, config) | vocabulary() | (meta or {})).items():
        if value is not None:
            _add(writer, key, value)
    for name, value in tensors.items():
        if name not in drop:
            quantised = gguf.GGMLQuantizationType[kind if value.ndim == 2 else "F32"]
            writer.add_tensor(name, gguf.quants.quantize(value, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(arch: str, config: dict) -> dict:
    heads = config["num_attention_heads"]
    width = config.get("head_dim", config["hidden_size"] // heads)
    meta = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": width,
        f"{arch}.attention.value_length": width,
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": config["rope_theta"],
    }
    if arch == "gemma3":
        meta["gemma3.attention.sliding_window"] = config["sliding_window"]
    return meta


def vocabulary() -> dict:
    """Metadata of a byte-level vocabulary: the 256 bytes, three merges, three control tokens and a plain added one."""
    merges = ["h e", "l l", "he ll"]
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in merges]
    added = ["<|bos|>", "<|eos|>", "<|eot|>", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + added,
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 3, 3, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
        "tokenizer.ggml.eot_token_id": len(tokens) + 2,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}<|eot|>{% endfor %}",
    }


def _add(writer: gguf.GGUFWriter, key: str, value) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
