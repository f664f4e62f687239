"""The checkpoints of MaLoRA's released code (`gated_lora_best.pt`), made into adapters with gates.

Such a file has `config`, the arguments of its `inject_malora`, and for every adapted module the state dicts of A, B and
the gate. Its reader rounds the state-space leaves to bf16; here they stay as they were trained.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util

from molora_jax.adapters.adapter import Adapter, GateGroup, LoRAWeights
from molora_jax.adapters.gate import GateConfig
from molora_jax.checkpoints import gate as gates
from molora_jax.checkpoints import peft_names, torch_file
from molora_jax.config import ModelConfig, UserError
from molora_jax.typing import Params

_RNN = {f"rnn.{name}_l0": f"cell.{name}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
_READOUT = {"down.weight": "proj.weight", "out.weight": "out.weight", "gate_bias": "out.bias"}
_PLACES = {
    "mamba": _READOUT,
    "gru": _RNN | _READOUT,
    "lstm": _RNN | _READOUT,
    "linear": {"linear.weight": "proj.weight", "linear.bias": "out.bias"},
    "toplora": {"weight": "proj.weight", "rms_norm.weight": "out.gain", "rms_weight": "out.gain"},
}
_PLAIN = dict(n_layers=1, residual_outer=False, binary_mode=False)
"""Options of the released code that no result uses, and their neutral values."""


def load(file: Path | str, cfg: ModelConfig, *, name: str | None = None) -> Adapter:
    """Reads a checkpoint for a decoder of the given config; nothing in the file is run.

    Every module gets a core of its own. Gates that the release shares within a layer share their weights only: each
    runs over its own module's input, so that copies of the weights do the same.

    Args:
      name: of the adapter; by default the file's.

    Raises:
      UserError: not such a checkpoint, one for another model, or one with options that have no counterpart.
    """
    raw = torch_file.load(file)
    if not isinstance(raw, dict) or not {"config", "gated_lora_states"} <= raw.keys() or not raw["gated_lora_states"]:
        raise UserError(f"{file}: got no config and gated_lora_states, expected a checkpoint of MaLoRA's train script")
    try:
        return _adapter(raw, cfg, name or Path(file).stem)
    except UserError as e:
        raise UserError(f"{file}: {e}") from None
    except (KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{file}: got a checkpoint without {e}; expected one of MaLoRA's train script") from None


def _adapter(raw: Mapping[str, Any], cfg: ModelConfig, name: str) -> Adapter:
    known = {module.name: module for module in peft_names.modules(cfg).values()}
    states = raw["gated_lora_states"]
    first = next((state["gate"] for state in states.values() if state["gate"]), {})
    config = _config(raw["config"], first)
    sites: dict[tuple, list] = {}
    cores: dict[tuple, list] = {}
    for key, state in states.items():
        if key not in known or not known[key].adaptable or known[key].path[0] != "layers":
            raise UserError(f"got {key}, which a {cfg.family} decoder with {cfg.layers} layers has not")
        module = known[key]
        a, b = state["lora_A"]["weight"], state["lora_B"]["weight"]
        if (b.shape[0], a.shape[1]) != module.linear:
            raise UserError(f"got an update of {(b.shape[0], a.shape[1])} at {key}, expected {module.linear}")
        empty = [None] * cfg.layers
        sites.setdefault(module.path, list(empty))[module.layer] = LoRAWeights(a=a, b=b, alpha=raw["config"]["alpha"])
        cores.setdefault(module.path, list(empty))[module.layer] = _core(config, state["gate"], key)
    adapter = Adapter(
        name=name,
        sites={path: tuple(column) for path, column in sites.items()},
        gate=config,
        gates=tuple(GateGroup(sites=(path,), cores=tuple(column)) for path, column in cores.items() if any(column)),
    )
    gates.check(adapter)
    return adapter


def _config(raw: Mapping[str, Any], first: Params) -> GateConfig:
    kind, scalar = raw["gate_type"], raw.get("scalar_output", False)
    if kind not in _PLACES:
        raise UserError(f"got gate_type {kind}, expected one of {', '.join(_PLACES)}")
    for field, neutral in _PLAIN.items():
        if raw.get(field, neutral) != neutral:
            raise UserError(f"got {field}={raw[field]}, expected {neutral}: other gates have no counterpart here")
    if kind == "mamba" and scalar and first and "out.weight" not in first:
        scalar = False  # the release ignored scalar_output at first, and reads such files so
    fields = dict(
        kind=kind,
        output="scalar" if scalar and kind != "toplora" else "diagonal",
        activation="exp" if kind == "toplora" else _activation(kind, raw),
        clamp=raw.get("gate_clamp_max"),
        norm=False,
        reads="h" if raw.get("direct_mode", False) and kind != "toplora" else "x",
        start="published",
        hidden=raw.get("rnn_hidden"),
        states=raw.get("d_state", 16),
        taps=raw.get("d_conv", 4),
        expand=raw.get("expand_factor", 2),
    )
    used = {"mamba": {"states", "taps", "expand"}, "gru": {"hidden"}, "lstm": {"hidden"}}.get(kind, set())
    unused = {"hidden", "states", "taps", "expand"} - used
    return GateConfig(**{key: value for key, value in fields.items() if key not in unused})


def _activation(kind: str, raw: Mapping[str, Any]) -> str:
    name = raw.get("gate_activation", "softplus")
    doubled = kind != "linear" and raw.get("gate_scale", 2.0) == 2.0
    found = {"softplus": "softplus", "sigmoid": "sigmoid" if kind == "linear" else "bounded" if doubled else None}
    if found.get(name) is None:
        raise UserError(f"got gate_activation {name}, expected softplus, or sigmoid with a gate_scale of 2")
    return found[name]


def _core(cfg: GateConfig, state: Mapping[str, np.ndarray], where: str) -> Params | None:
    """The released leaves under their names here; None for a module that the release gave no gate."""
    if not state:
        return None
    flat, leaves = {}, gates.leaves(cfg)
    for key, value in state.items():
        place = f"cell.{key.removeprefix('mamba.')}" if key.startswith("mamba.") else _PLACES[cfg.kind].get(key)
        if place not in leaves:
            raise UserError(f"got {key} in the gate of {where}, expected that of gate_type {cfg.kind}")
        flat[place] = value if place == "proj.weight" else value.astype(np.promote_types(value.dtype, np.float32))
    if cfg.kind == "toplora":
        flat["proj.weight"], flat["out.gain"] = np.ascontiguousarray(flat["proj.weight"].T), flat["out.gain"][None]
    else:
        # A scalar output reads the first of R biases. λ is 1 at z = 0 here, at ln(e - 1) there.
        bias = flat["out.bias"][: 1 if cfg.output == "scalar" else None]
        start = math.log(math.e - 1) if cfg.activation == "softplus" else 0.0
        flat["out.bias"] = (bias.astype(np.float64) - start).astype(bias.dtype)[None]
    if cfg.kind == "mamba" and "out.weight" not in flat:
        flat["out.weight"] = np.eye(flat["out.bias"].shape[1], dtype=flat["out.bias"].dtype)
    if "out.weight" in flat:
        flat["out.weight"] = flat["out.weight"][None]
    return traverse_util.unflatten_dict(flat, sep=".")
