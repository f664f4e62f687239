"""The supported architectures: HF `config.json` to `ModelConfig` and back, and the names of their weights.

One decoder (`models.transformer`) runs them all; a family is only a set of switches and a table of names.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from molora_jax.config import ModelConfig, Rope, UserError

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Family:
    """How one architecture is written down in a HF folder.

    Attributes:
      architecture: class name that transformers loads the weights with.
      switches: `config.json` to the fields of `ModelConfig` that make this family what it is.
      defaults: what a key that `config.json` leaves out stands for, as in the configuration class of transformers.
    """

    architecture: str
    switches: Callable[[Json], Json]
    defaults: Json = dataclasses.field(default_factory=dict)


def _llama(hf: Json) -> Json:
    bias = hf.get("attention_bias", False)
    return dict(qkv_bias=bias, o_bias=bias, mlp_bias=hf.get("mlp_bias", False))


def _qwen3(hf: Json) -> Json:
    bias = hf.get("attention_bias", False)
    return dict(qkv_bias=bias, o_bias=bias, qk_norm=True)


def _gemma3(hf: Json) -> Json:
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if hf.get(cap):
            raise UserError(
                f"config: got {cap}={hf[cap]}, expected none: soft caps are not supported (Gemma 3 has none)"
            )
    bias = hf.get("attention_bias", False)
    return dict(
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        post_norms=True,
        norm_offset=1.0,
        embed_scale=math.sqrt(hf["hidden_size"]),
        attn_scale=hf["query_pre_attn_scalar"] ** -0.5,
    )


_COMMON = dict(hidden_act="silu", rms_norm_eps=1e-6, rope_theta=10_000.0, tie_word_embeddings=False)
_QWEN = dict(max_position_embeddings=32768, num_key_value_heads=32, sliding_window=4096, max_window_layers=28)
_GEMMA3 = dict(
    vocab_size=262208,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    max_position_embeddings=131072,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    rope_theta=1e6,
    rope_local_base_freq=10_000.0,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    sliding_window_pattern=6,
)

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _llama, _COMMON | dict(max_position_embeddings=2048)),
    "mistral": Family(
        "MistralForCausalLM",
        lambda hf: {},
        _COMMON | dict(max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096),
    ),
    "qwen2": Family("Qwen2ForCausalLM", lambda hf: dict(qkv_bias=True), _COMMON | _QWEN),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3, _COMMON | _QWEN | dict(head_dim=128)),
    "gemma3_text": Family("Gemma3ForCausalLM", _gemma3, _GEMMA3),
}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def from_hf(hf: Json) -> ModelConfig:
    """Reads the contents of a HF `config.json`; of a Gemma 3 that also sees images, the part of the text decoder.

    Raises:
      UserError: an architecture, activation or rope scaling that is not supported, or a missing key.
    """
    if hf.get("model_type") == "gemma3" and "text_config" in hf:
        tied = {key: hf[key] for key in ("tie_word_embeddings",) if key in hf}
        hf = hf["text_config"] | tied | {"model_type": "gemma3_text"}
    family = hf.get("model_type")
    if family not in FAMILIES:
        raise UserError(f"config: got model_type {family!r}, expected one of {', '.join(FAMILIES)}")
    try:
        return _from_hf(family, FAMILIES[family].defaults | hf)
    except KeyError as e:
        raise UserError(f"config: key {e} is missing, expected in the config.json of a {family} model") from None


def _from_hf(family: str, hf: Json) -> ModelConfig:
    if hf.get("is_causal") is False or hf.get("use_bidirectional_attention"):
        raise UserError("config: got a model that reads in both directions, expected one that reads from the left")
    act = hf.get("hidden_activation") or hf["hidden_act"]
    if act not in ACTIVATIONS:
        raise UserError(f"config: got activation {act!r}, expected one of {', '.join(ACTIVATIONS)}")
    head_width = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    rope, local_rope = _ropes(family, hf)
    fields = dict(
        family=family,
        vocab=hf["vocab_size"],
        layers=hf["num_hidden_layers"],
        width=hf["hidden_size"],
        mlp_width=hf["intermediate_size"],
        heads=hf["num_attention_heads"],
        kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
        head_width=head_width,
        windows=_windows(family, hf),
        rope=rope,
        local_rope=local_rope,
        max_positions=hf["max_position_embeddings"],
        norm_eps=hf["rms_norm_eps"],
        activation=ACTIVATIONS[act],
        tied=hf["tie_word_embeddings"],
        attn_scale=head_width**-0.5,
    )
    return ModelConfig(**fields | FAMILIES[family].switches(hf))


def _windows(family: str, hf: Json) -> tuple[int, ...]:
    layers, window = hf["num_hidden_layers"], hf.get("sliding_window") or 0
    if kinds := hf.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if family == "mistral":
        return (window,) * layers
    if family == "gemma3_text":
        pattern = hf["sliding_window_pattern"]
        return tuple(window if (i + 1) % pattern else 0 for i in range(layers))
    if family in ("qwen2", "qwen3") and hf.get("use_sliding_window"):
        first = hf["max_window_layers"]
        return tuple(window if i >= first else 0 for i in range(layers))
    return (0,) * layers


def _ropes(family: str, hf: Json) -> tuple[Rope, Rope | None]:
    """Reads what transformers 4 wrote (`rope_theta`, `rope_scaling`) and what 5 does (`rope_parameters`)."""
    params = hf.get("rope_parameters") or {}
    if "full_attention" in params:
        return _rope(params["full_attention"]), _rope(params["sliding_attention"])
    rope = _rope({"rope_theta": hf["rope_theta"]} | (hf.get("rope_scaling") or {}) | params)
    return rope, Rope(theta=hf["rope_local_base_freq"]) if family == "gemma3_text" else None


def _rope(params: Json) -> Rope:
    kind = params.get("rope_type") or params.get("type") or "default"
    if params.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"config: got partial_rotary_factor {params['partial_rotary_factor']}, expected 1")
    theta = float(params["rope_theta"])
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, scaling="linear", factor=float(params["factor"]))
    if kind == "llama3":
        return Rope(
            theta=theta,
            scaling="llama3",
            factor=float(params["factor"]),
            low_freq_factor=float(params["low_freq_factor"]),
            high_freq_factor=float(params["high_freq_factor"]),
            original_positions=int(params["original_max_position_embeddings"]),
        )
    raise UserError(f"config: got rope type {kind!r}, expected default, linear or llama3")


def to_hf(cfg: ModelConfig) -> Json:
    """Writes the `config.json` that `from_hf` reads back to an equal config and transformers (4 and 5) loads.

    Raises:
      UserError: the family has no key for a field of `cfg`, so that another model would be read back.
    """
    windowed = any(cfg.windows)
    hf = dict(
        model_type=cfg.family,
        architectures=[FAMILIES[cfg.family].architecture],
        vocab_size=cfg.vocab,
        num_hidden_layers=cfg.layers,
        hidden_size=cfg.width,
        intermediate_size=cfg.mlp_width,
        num_attention_heads=cfg.heads,
        num_key_value_heads=cfg.kv_heads,
        head_dim=cfg.head_width,
        max_position_embeddings=cfg.max_positions,
        rms_norm_eps=cfg.norm_eps,
        tie_word_embeddings=cfg.tied,
        rope_theta=cfg.rope.theta,
        rope_scaling=_rope_to_hf(cfg.rope),
        sliding_window=max(cfg.windows) or None,
        attention_bias=cfg.o_bias,
    )
    act = {v: k for k, v in ACTIVATIONS.items()}[cfg.activation]
    hf["hidden_activation" if cfg.family == "gemma3_text" else "hidden_act"] = act
    if cfg.family == "llama":
        hf["mlp_bias"] = cfg.mlp_bias
    if cfg.family in ("qwen2", "qwen3"):
        hf["use_sliding_window"] = windowed
    if cfg.family in ("qwen2", "qwen3", "gemma3_text"):
        hf["layer_types"] = ["sliding_attention" if w else "full_attention" for w in cfg.windows]
    if cfg.family == "gemma3_text":
        hf["query_pre_attn_scalar"] = round(cfg.attn_scale**-2)
        hf["rope_local_base_freq"] = cfg.local_rope.theta
        hf["final_logit_softcapping"] = hf["attn_logit_softcapping"] = None
    back = from_hf(hf)
    for field in dataclasses.fields(cfg):
        ours, theirs = getattr(cfg, field.name), getattr(back, field.name)
        if ours != theirs:
            raise UserError(f"config: got {field.name}={ours}, but a {cfg.family} config.json can only say {theirs}")
    return hf


def _rope_to_hf(rope: Rope) -> Json | None:
    if rope.scaling == "none":
        return None
    if rope.scaling == "linear":
        return {"rope_type": "linear", "factor": rope.factor}
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_positions,
    }


_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_SANDWICH_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def hf_name(cfg: ModelConfig, path: tuple[str, ...]) -> str:
    """HF name of the parameter at `path` of the parameter tree; `{}` stands for the layer's number.

    `("layers", "attn", "q_proj", "weight")` is `model.layers.{}.self_attn.q_proj.weight`.
    """
    match path:
        case ("embed", leaf):
            return f"model.embed_tokens.{leaf}"
        case ("norm", leaf):
            return f"model.norm.{leaf}"
        case ("head", leaf):
            return f"lm_head.{leaf}"
        case ("layers", "attn", *rest):
            return ".".join(("model.layers.{}.self_attn", *rest))
        case ("layers", "mlp", *rest):
            return ".".join(("model.layers.{}.mlp", *rest))
        case ("layers", norm, leaf):
            return f"model.layers.{{}}.{(_SANDWICH_NORMS if cfg.post_norms else _NORMS)[norm]}.{leaf}"
    raise KeyError(path)
