"""LoRA adapters in the folders that PEFT reads and writes: `adapter_config.json` and `adapter_model.safetensors`."""

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import safetensors
import safetensors.numpy

from molora_jax import files
from molora_jax.adapters.adapter import Adapter, LoRAWeights
from molora_jax.checkpoints import gate as gates
from molora_jax.checkpoints import peft_config, peft_export, peft_names, peft_plan, tensors
from molora_jax.checkpoints.json_file import read_object
from molora_jax.checkpoints.peft_config import PeftConfig
from molora_jax.checkpoints.peft_names import Index, Module
from molora_jax.checkpoints.peft_plan import Plan
from molora_jax.config import ModelConfig, UserError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
Allowance = Literal["missing", "unused", "targets", "patterns", "config", "nonfinite"]


class Site(NamedTuple):
    """What a report says of one adapted module."""

    rank: int
    alpha: float
    scale: float
    dtype: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What `load` did with a folder; `str()` of it is a table to show.

    Attributes:
      sites: the adapted modules, by their name in transformers.
      whole: names of the tensors that replace the base's (`modules_to_save`, saved embeddings, trained biases).
      missing, unused: names of tensors that the config asks for, and that the file holds besides; both are empty unless
        they were allowed.
      notes: what was allowed or repaired, a line each.
    """

    folder: str
    sites: dict[str, Site]
    whole: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        width = max(map(len, self.sites), default=0)
        lines = [f"{self.folder}: {len(self.sites)} modules adapted, {len(self.whole)} tensors replaced"]
        for name, site in self.sites.items():
            numbers = f"rank {site.rank:<4} alpha {site.alpha:<6g} scale {site.scale:<8.4g} {site.dtype}"
            lines.append(f"  {name:{width}}  {numbers}")
        for title in ("whole", "missing", "unused", "notes"):
            lines += [f"  {title}: {line}" for line in getattr(self, title)]
        return "\n".join(lines)


class _Problems:
    """Raises what the caller did not allow, and notes the rest."""

    def __init__(self, allow: Collection[str]):
        if unknown := set(allow) - set(get_args(Allowance)):
            raise UserError(f"load: got allow={sorted(unknown)}, expected some of {', '.join(get_args(Allowance))}")
        self.allow, self.notes = allow, []

    def __call__(self, kind: str, line: str) -> None:
        if kind not in self.allow:
            raise UserError(f"{line} (allow={{{kind!r}}} tolerates it)")
        self.notes.append(line)


def load(
    folder: Path | str,
    cfg: ModelConfig,
    *,
    name: str | None = None,
    allow: Collection[Allowance] = (),
    dtype=None,
) -> tuple[Adapter, Report]:
    """Reads an adapter that PEFT (or anything that writes its format) saved, for a decoder of the given config.

    Gates, which PEFT does not know, are read from `checkpoints.gate`'s files in the same folder.

    Every tensor that the config asks for must be in the file, and the other way round. A prefix of the names that is
    not PEFT's (a missing `model.`, none at all, an adapter's name inside) is recognised and noted.

    Args:
      name: of the adapter; by default the folder's.
      allow: what is to be tolerated, and noted in the report, instead of ending in an error:
        `missing` tensors (the module is left unadapted), `unused` tensors, `targets` (names in `target_modules` and the
        like that the model has not), `patterns` (of ranks and alphas that match nothing), `config` (fields that are not
        supported), `nonfinite` values.
      dtype: of the arrays; None keeps the file's. The small leaves of gates are fp32 (or wider) all the same.

    Raises:
      UserError: nothing in the file fits the model, or one of the above; the line says what and where.
    """
    folder, problem = Path(folder), _Problems(allow)
    origin, where = _read_json(folder), str(folder / WEIGHTS)
    config = peft_config.parse(origin, str(folder / CONFIG), problem)
    known = peft_names.modules(cfg)
    with _open(folder) as handle:
        index = peft_names.index(handle.keys(), known, where)
        plan = peft_plan.plan(where, cfg, config, known, index, problem)
        if not plan.sites and not plan.full:
            raise UserError(f"{where}: got no module that is whole, expected one at least; nothing would be adapted")
        slices = {name: handle.get_slice(name) for name in plan.names}
        peft_plan.check_shapes(
            where, known, plan, {n: (tuple(s.get_shape()), s.get_dtype()) for n, s in slices.items()}
        )
        arrays = {name: handle.get_tensor(name) for name in plan.names}
    for key, value in arrays.items():
        if not np.isfinite(value.astype(np.float32)).all():
            problem("nonfinite", f"{where}: got NaN or infinity in {key}, expected finite numbers")
    if dtype is not None:
        arrays = {key: value.astype(dtype) for key, value in arrays.items()}
    adapter = _adapter(name or folder.resolve().name, config, known, plan, arrays, origin)
    adapter = gates.load(folder, cfg, adapter, dtype)
    return adapter, _report(folder, index, plan, known, adapter, problem.notes)


def save(folder: Path | str, cfg: ModelConfig, adapter: Adapter) -> None:
    """Writes an adapter as a folder that `load` and PEFT read; of one with gates, PEFT reads the plain LoRA alone.

    What was read by `load` and not changed is written byte for byte as PEFT wrote it. The fields of the config that
    describe the tensors follow the tensors; all others are those that `adapter.origin` holds.

    Args:
      folder: made if it is not there.

    Raises:
      UserError: the adapter does not fit the model, or PEFT cannot express it.
    """
    folder = Path(folder)
    known = peft_names.modules(cfg)
    values = peft_export.values(adapter, known)
    config = peft_export.config(adapter, cfg, known)
    gates.check(adapter)
    folder.mkdir(parents=True, exist_ok=True)
    tensors.write_file(values, folder / WEIGHTS, format="pt")
    gates.save(folder, cfg, adapter)
    files.write(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True))  # last: with it the folder is whole


def _read_json(folder: Path) -> peft_config.Json:
    file = folder / CONFIG
    if not folder.is_dir():
        raise UserError(f"{folder}: got no such folder, expected one with {CONFIG} and {WEIGHTS}")
    return read_object(file, expected="the config of a PEFT adapter")


def _open(folder: Path):
    file = folder / WEIGHTS
    if not file.is_file() and (pickles := sorted(folder.glob("*.bin"))):
        raise UserError(
            f"{folder}: got {pickles[0].name}, a pickle, which is never loaded; expected {WEIGHTS}: convert it with "
            "PEFT, PeftModel.from_pretrained(base, folder).save_pretrained(folder)"
        )
    try:
        return safetensors.safe_open(file, "numpy")
    except FileNotFoundError:
        raise UserError(f"{folder}: got a folder without weights, expected {WEIGHTS}") from None
    except (safetensors.SafetensorError, OSError) as e:
        raise UserError(f"{file}: got no whole safetensors file ({e}); download or export it again") from None


def _adapter(name: str, config: PeftConfig, known: Mapping[str, Module], plan: Plan, arrays, origin) -> Adapter:
    layers = {}
    for module in known.values():
        layers[module.path] = max(layers.get(module.path, 0), module.layer + 1)
    sites = {known[key].path: [None] * layers[known[key].path] for key in plan.sites}
    for key, (_, alpha) in plan.sites.items():
        parts = {part: arrays[name] for (owner, part), name in plan.updates.items() if owner == key}
        sites[known[key].path][known[key].layer] = LoRAWeights(**parts, alpha=alpha, rslora=config.use_rslora)

    def columns(places: dict[tuple[str, str], str]):
        found = {}
        for (key, leaf), name in places.items():
            path = (*known[key].path, leaf)
            found.setdefault(path, [None] * layers[path[:-1]])[known[key].layer] = arrays[name]
        return {path: tuple(column) for path, column in found.items()}

    sites = {path: tuple(column) for path, column in sites.items()}
    return Adapter(name=name, sites=sites, full=columns(plan.full), base=columns(plan.base), origin=origin)


def _report(folder: Path, index: Index, plan: Plan, known: Mapping[str, Module], adapter: Adapter, notes) -> Report:
    sites = {}
    for key in plan.sites:
        weights = adapter.sites[known[key].path][known[key].layer]
        sites[known[key].name] = Site(weights.rank, weights.alpha, weights.scale, weights.a.dtype.name)
    if index.repaired:
        notes = [f"{WEIGHTS}: names begin with {index.prefix!r}, which PEFT would overlook", *notes]
    whole = (*plan.full.values(), *plan.base.values())
    return Report(str(folder), sites, whole, plan.missing, plan.unused, tuple(notes))
