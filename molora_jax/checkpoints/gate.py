"""The gates of an adapter on disk, beside the PEFT files: `gate_config.json` and `gate_model.safetensors`.

The config holds the fields of `GateConfig` and `groups`, each a list of the modules that listen to one core. A core's
tensors are named after the first of them: `model.layers.0.self_attn.q_proj.gate.cell.A_log`.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import traverse_util

from molora_jax.adapters import adapter as adapters
from molora_jax.adapters import gate
from molora_jax.adapters.adapter import Adapter, GateGroup
from molora_jax.adapters.gate import GateConfig
from molora_jax.checkpoints import tensors
from molora_jax.config import ModelConfig, UserError
from molora_jax.models import families
from molora_jax.typing import Params

CONFIG = "gate_config.json"
WEIGHTS = "gate_model.safetensors"


def load(folder: Path, cfg: ModelConfig, adapter: Adapter, dtype=None) -> Adapter:
    """The adapter with the gates of its folder, or as it is where the folder has none.

    Every tensor must have its place and every place its tensor; a layer without any of a group has plain LoRA there.

    Args:
      dtype: of the projections; all else is fp32 (or wider) whatever the file holds.

    Raises:
      UserError: the files are not whole, or not for this adapter and model.
    """
    if not (folder / CONFIG).exists():
        if (folder / WEIGHTS).exists():
            raise UserError(f"{folder}: got {WEIGHTS} without {CONFIG}; copy both, or remove it for plain LoRA")
        return adapter
    config, names = _read_json(folder / CONFIG, cfg, adapter)
    try:
        arrays = safetensors.numpy.load_file(folder / WEIGHTS)
    except (safetensors.SafetensorError, OSError) as e:
        raise UserError(f"{folder / WEIGHTS}: got no whole safetensors file ({e}); download or save it again") from None
    groups = []
    for sites in names:
        first, cores = _name(cfg, sites[0]), []
        for layer in range(cfg.layers):
            prefix = f"{first.format(layer)}.gate."
            own = {leaf: arrays.pop(prefix + leaf) for leaf in leaves(config) if prefix + leaf in arrays}
            own = {leaf: _cast(leaf, value, dtype) for leaf, value in own.items()}
            cores.append(traverse_util.unflatten_dict(own, sep=".") if own else None)
        groups.append(GateGroup(sites=sites, cores=tuple(cores)))
    if arrays:
        raise UserError(f"{folder / WEIGHTS}: got {min(arrays)}, which belongs to no group of {CONFIG}")
    try:
        gated = dataclasses.replace(adapter, gate=config, gates=tuple(groups))
        check(gated)
    except UserError as e:
        raise UserError(f"{folder}: {e}") from None
    return gated


def save(folder: Path, cfg: ModelConfig, adapter: Adapter) -> None:
    """Writes the gates, which `check` has passed, into a folder; of an adapter without gates it removes older ones."""
    if not adapter.gates:
        for name in (CONFIG, WEIGHTS):
            (folder / name).unlink(missing_ok=True)
        return
    values = {f"{_name(cfg, s[0]).format(i)}.gate.{key}": value for s, i, key, value in _leaves(adapter)}
    tensors.write_file(values, folder / WEIGHTS, format="np")
    groups = [[_name(cfg, path).format("*") for path in group.sites] for group in adapter.gates]
    fields = dataclasses.asdict(adapter.gate) | dict(groups=groups)
    (folder / CONFIG).write_text(json.dumps(fields, indent=2))


def leaves(config: GateConfig) -> list[str]:
    """Names of the leaves of a core, `cell.A_log`."""
    return list(traverse_util.flatten_dict(gate.abstract(config, d_in=1, rank=1), sep="."))


def check(adapter: Adapter) -> None:
    """Raises unless every core has the leaves that its config asks for, in shapes that fit the updates it scales."""
    for group in adapter.gates:
        for layer, core in enumerate(group.cores):
            if core is not None:
                _check_core(adapter, group, layer, core)


def _check_core(adapter: Adapter, group: GateGroup, layer: int, core: Params) -> None:
    where = f"gate of layer {layer} at {'.'.join(group.sites[0])}"
    updates = [adapter.sites[path][layer] for path in group.sites]
    if any(update is None for update in updates):
        raise UserError(f"{where}: got a core where a site has no update, expected none or an update at all sites")
    ranks = {update.rank for update in updates}
    if adapter.gate.output == "diagonal" and len(ranks) > 1:
        raise UserError(f"{where}: got ranks {sorted(ranks)}, expected one: the output is diagonal")
    sizes = dict(d_in=updates[0].a.shape[1], rank=updates[0].rank, heads=len(updates))
    wanted = traverse_util.flatten_dict(gate.abstract(adapter.gate, **sizes), sep=".")
    got = traverse_util.flatten_dict(core, sep=".")
    if lost := sorted(wanted.keys() ^ got.keys()):
        raise UserError(f"{where}: got leaves {', '.join(sorted(got))}; {lost[0]} is missing or has no place")
    for key, leaf in wanted.items():
        if got[key].shape != leaf.shape:
            raise UserError(f"{where}: got shape {got[key].shape} for {key}, expected {leaf.shape}")
        if not np.isfinite(np.asarray(got[key], np.float64)).all():
            raise UserError(f"{where}: got NaN or infinity in {key}, expected finite numbers")


def _leaves(adapter: Adapter) -> Iterator[tuple[tuple[adapters.Path, ...], int, str, np.ndarray]]:
    for group in adapter.gates:
        for layer, core in enumerate(group.cores):
            for key, value in traverse_util.flatten_dict(core or {}, sep=".").items():
                yield group.sites, layer, key, np.ascontiguousarray(value)


def _cast(key: str, value: np.ndarray, dtype) -> np.ndarray:
    if key == "proj.weight":
        return value if dtype is None else value.astype(dtype)
    return value.astype(jnp.promote_types(value.dtype, np.float32))


def _name(cfg: ModelConfig, path: adapters.Path) -> str:
    """`model.layers.{}.self_attn.q_proj` of a site."""
    return families.hf_name(cfg, (*path, "weight")).removesuffix(".weight")


def _read_json(file: Path, cfg: ModelConfig, adapter: Adapter) -> tuple[GateConfig, list[tuple[adapters.Path, ...]]]:
    try:
        raw = json.loads(file.read_text())
        groups = [list(map(str, group)) for group in raw.pop("groups")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{file}: got no JSON object with groups ({e!r}); download or save it again") from None
    known: Mapping[str, adapters.Path] = {_name(cfg, path).format("*"): path for path in adapter.sites}
    for name in (name for group in groups for name in group):
        if name not in known:
            raise UserError(f"{file}: got {name} in a group, expected one of {', '.join(known)}")
    if unknown := sorted(set(raw) - {field.name for field in dataclasses.fields(GateConfig)}):
        raise UserError(f"{file}: got {unknown[0]}, which no gate has; it was written by another version")
    try:
        return GateConfig(**raw), [tuple(known[name] for name in group) for group in groups]
    except (UserError, TypeError) as e:
        raise UserError(f"{file}: {e}") from None
