"""Makes the golden files beside it: tiny random models of every family, with the logits that transformers gives.

    pip install torch==2.13.0 transformers==5.24.0
    python tests/goldens/make.py

Each `NAME.npz` holds the `config.json` as hub files write it (`config`) and as transformers saves it
(`saved_config`), the weights under their HF names (`weights/...`, float16 that is exact), three unpadded rows of
tokens and their fp32 logits (`tokens/i` [T], `logits/i` [T, V]; attention "eager"). The script also checks, of the
reference itself, that padding on either side changes no real token, and that every weight and every switch of a
variant matters.
"""

import json
import pathlib
import zlib

import numpy as np
import torch
import transformers

SIZES = dict(
    vocab_size=97,
    hidden_size=36,
    intermediate_size=44,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=500.0,
)
LINEAR = {"rope_type": "linear", "factor": 8.0}
LLAMA3 = {  # over d = 6 it keeps one frequency, blends one and divides one
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA3 = dict(
    model_type="gemma3_text",
    num_hidden_layers=7,
    intermediate_size=28,
    head_dim=8,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=12,
    sliding_window=6,
    sliding_window_pattern=6,
    rope_theta=5000.0,
    rope_local_base_freq=50.0,
)

# name: (fields of config.json, for each switch the fields without which the logits must change)
VARIANTS = {
    "llama_tied": (dict(model_type="llama", tie_word_embeddings=True), {}),
    "llama_untied": (dict(model_type="llama", tie_word_embeddings=False, num_hidden_layers=3), {}),
    "llama_rope_llama3": (
        dict(model_type="llama", tie_word_embeddings=True, max_position_embeddings=256, rope_scaling=LLAMA3),
        dict(scaling=dict(rope_scaling=None), blend=dict(rope_scaling=LLAMA3 | {"high_freq_factor": 1.001})),
    ),
    "llama_rope_linear": (
        dict(model_type="llama", tie_word_embeddings=True, head_dim=10, rope_scaling={"type": "linear", "factor": 3.0}),
        dict(scaling=dict(rope_scaling=None)),
    ),
    "llama_bias": (
        dict(model_type="llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        dict(attention=dict(attention_bias=False), mlp=dict(mlp_bias=False)),
    ),
    "mistral_window": (
        dict(model_type="mistral", tie_word_embeddings=False, head_dim=10, sliding_window=7),
        dict(window=dict(sliding_window=None), off_by_one=dict(sliding_window=8)),
    ),
    "qwen2": (dict(model_type="qwen2", tie_word_embeddings=True, num_key_value_heads=3, hidden_size=48), {}),
    "qwen2_window": (
        dict(
            model_type="qwen2",
            tie_word_embeddings=False,
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=1,
        ),
        dict(window=dict(use_sliding_window=False), layers=dict(max_window_layers=0)),
    ),
    "qwen3": (dict(model_type="qwen3", tie_word_embeddings=True, head_dim=10), {}),
    "gemma3": (
        GEMMA3,
        dict(
            window=dict(sliding_window=64),
            pattern=dict(sliding_window_pattern=7),
            local_base=dict(rope_local_base_freq=5000.0),
            global_base=dict(rope_theta=50.0),
            scale=dict(query_pre_attn_scalar=8),
        ),
    ),
    "gemma3_rope_linear": (GEMMA3 | dict(rope_scaling=LINEAR), dict(scaling=dict(rope_scaling=None))),
}
LENGTHS = (47, 18, 1)
FOLDER = pathlib.Path(__file__).parent


def seeded(*names: str) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(name.encode()) for name in names])


def weight(variant: str, name: str, shape: tuple[int, ...], *, offset: float) -> np.ndarray:
    """Random values on a grid of 1/64, which float16 holds exactly and which packs well; no norm is 1, no bias 0."""
    noise = seeded(variant, name).standard_normal(shape)
    if "norm" in name:
        value = 1 - offset + 0.3 * noise
    elif name.endswith("bias"):
        value = 0.5 * noise
    elif "embed_tokens" in name or "lm_head" in name:
        value = 0.7 * noise
    else:
        value = 1.3 * noise / shape[-1] ** 0.5
    return (np.round(value * 64) / 64).astype(np.float16)


def build(variant: str, hf: dict) -> tuple[torch.nn.Module, dict[str, np.ndarray]]:
    """The reference model of a config, and its weights under HF names (tied heads once)."""
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**hf), attn_implementation="eager", dtype=torch.float32
    ).eval()
    offset = 1.0 if hf["model_type"] == "gemma3_text" else 0.0
    weights = {k: weight(variant, k, tuple(p.shape), offset=offset) for k, p in model.named_parameters()}
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(torch.from_numpy(weights[name].astype(np.float32)))
    return model, weights


@torch.no_grad()
def rows_alone(model, rows: list[np.ndarray]) -> list[np.ndarray]:
    """Logits [T, V] of each row in a batch of its own."""
    return [model(torch.from_numpy(row)[None], use_cache=False).logits[0].numpy() for row in rows]


@torch.no_grad()
def rows_padded(model, rows: list[np.ndarray], side: str) -> list[np.ndarray]:
    """Logits [T, V] of the real tokens of each row, all rows in one batch padded with token 5 on `side`."""
    longest = max(map(len, rows))
    spans = [slice(0, len(r)) if side == "right" else slice(longest - len(r), longest) for r in rows]
    tokens, mask = np.full((len(rows), longest), 5), np.zeros((len(rows), longest), np.int64)
    for i, (row, span) in enumerate(zip(rows, spans, strict=True)):
        tokens[i, span], mask[i, span] = row, 1
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    ids, mask, positions = map(torch.from_numpy, (tokens, mask, positions))
    logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits.numpy()
    return [out[span] for out, span in zip(logits, spans, strict=True)]


def assert_all_matter(model, row: np.ndarray) -> None:
    """Every parameter moves the logits, so that a test against them sees each one that is missing or misplaced."""
    model(torch.from_numpy(row)[None], use_cache=False).logits.square().mean().backward()
    for name, param in model.named_parameters():
        assert param.grad.abs().max() > 1e-2, (name, param.grad.abs().max())


def distance(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


def make(name: str) -> None:
    fields, switches = VARIANTS[name]
    hf = SIZES | fields
    model, weights = build(name, hf)
    rows = [seeded(name, f"row {i}").integers(0, hf["vocab_size"], n) for i, n in enumerate(LENGTHS)]
    logits = rows_alone(model, rows)
    pads = max(distance(logits, rows_padded(model, rows, side)) for side in ("left", "right"))
    assert pads < 1e-4, (name, pads)
    changes = {k: distance(logits, rows_alone(build(name, hf | off)[0], rows)) for k, off in switches.items()}
    assert all(change > 0.1 for change in changes.values()), (name, changes)
    assert_all_matter(model, rows[0])
    path = FOLDER / f"{name}.npz"
    np.savez_compressed(
        path,
        config=json.dumps({"architectures": [type(model).__name__], **hf}),
        saved_config=model.config.to_json_string(),
        **{f"weights/{k}": v for k, v in weights.items()},
        **{f"tokens/{i}": row.astype(np.int32) for i, row in enumerate(rows)},
        **{f"logits/{i}": row for i, row in enumerate(logits)},
    )
    magnitude = np.std(np.concatenate(logits))
    print(f"{name:20} {path.stat().st_size:8,} B  logits ±{magnitude:.2f}  pads {pads:.1e}  switches {changes}")


if __name__ == "__main__":
    for variant in VARIANTS:
        make(variant)
