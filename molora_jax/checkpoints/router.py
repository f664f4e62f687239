"""Trained routers in a folder: `router.safetensors`, and `router.json` that says what they were trained with."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from molora_jax import files
from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.digest import adapter_digest, base_digest
from molora_jax.adapters.mixtures.arrow import Arrow
from molora_jax.adapters.mixtures.classifier import PromptClassifier
from molora_jax.adapters.mixtures.mole import Mole
from molora_jax.adapters.mixtures.phatgoose import Phatgoose
from molora_jax.adapters.mixtures.soups import Soup
from molora_jax.adapters.mixtures.xlora import XLoRA
from molora_jax.adapters.route import NONE
from molora_jax.adapters.router import Router
from molora_jax.adapters.selection import Placement, Rule
from molora_jax.config import UserError
from molora_jax.typing import Params

CONFIG, WEIGHTS = "router.json", "router.safetensors"
FORMAT = "molora_jax router 1"
KINDS = {
    "router": Router,
    "arrow": Arrow,
    "mole": Mole,
    "phatgoose": Phatgoose,
    "soup": Soup,
    "xlora": XLoRA,
    "classifier": PromptClassifier,
}
_DATA = ("params", "placement", "temperature", "key")
_BASE = "(base)"


def save(folder: str | Path, router: Any, experts: Sequence[Adapter | None], base: Params) -> None:
    """Writes a router, with the names and contents of its experts in its order, and of the base.

    Args:
      router: any of `KINDS`.
      experts: J of them; None for one that is the base alone.
      base: parameters of the model that the router was trained on.
    """
    folder = Path(folder)
    kind = next((name for name, cls in KINDS.items() if type(router) is cls), None)
    if kind is None:
        raise UserError(f"router: got a {type(router).__name__}, expected one of {', '.join(KINDS)}")
    if len(experts) != len(router.placement.slots):
        raise UserError(
            f"router: got {len(experts)} experts to save it with, expected its {len(router.placement.slots)}"
        )
    tensors = _flat(router)
    settings = {f.name: getattr(router, f.name) for f in dataclasses.fields(router) if f.name not in _DATA}
    if "rule" in settings:
        settings["rule"] = dataclasses.asdict(settings["rule"])
    config = dict(
        format=FORMAT,
        kind=kind,
        settings=settings,
        sizes={name: list(value.shape) for name, value in tensors.items()},
        experts=[dict(name=_name(e), digest=_digest(e)) for e in experts],
        base=base_digest(base),
    )
    files.write(folder / WEIGHTS, safetensors.numpy.save(tensors))
    files.write(folder / CONFIG, json.dumps(config, indent=2))  # last: with it the folder is whole


def load(folder: str | Path, experts: Sequence[Adapter | None], base: Params) -> Any:
    """Reads the router, its experts in the first slots of a bank of as many; `placed` moves them.

    Args:
      experts: in the router's order.

    Raises:
      UserError: no such files, or experts, an order or a base other than those it was trained with.
    """
    folder = Path(folder)
    config = _config(folder)
    _check_experts(folder, config["experts"], experts)
    if (found := base_digest(base)) != config["base"]:
        raise UserError(f"{folder}: got a base of content {found}, expected {config['base']}, which it was trained on")
    tensors = _tensors(folder, config["sizes"])
    slots = [NONE if e is None else i for i, e in enumerate(experts)]
    fields: dict[str, Any] = dict(placement=Placement(jnp.asarray(slots, jnp.int32), max(len(experts), 1)))
    if "temperature" in tensors:
        fields["temperature"] = jnp.asarray(tensors.pop("temperature"))
    return KINDS[config["kind"]](params=_nested(tensors), **fields, **_settings(folder, config))


def _flat(router) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(router.params)
    found = {"/".join(("params", *(entry.key for entry in path))): np.asarray(leaf) for path, leaf in leaves}
    if hasattr(router, "temperature"):
        found["temperature"] = np.asarray(router.temperature, np.float32)
    return {name: np.ascontiguousarray(value) for name, value in found.items()}


def _nested(tensors: dict[str, np.ndarray]) -> Params:
    tree: Params = {}
    for name, value in tensors.items():
        _, *path, leaf = name.split("/")
        at = tree
        for key in path:
            at = at.setdefault(key, {})
        at[leaf] = jnp.asarray(value)
    return tree


def _config(folder: Path) -> dict:
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        pickles = sorted(p.name for p in folder.glob("*") if p.suffix in (".pt", ".pth", ".bin", ".pkl"))
        got = f"{pickles[0]}, a pickle, which is never loaded" if pickles else "no router"
        raise UserError(f"{folder}: got {got}, expected {CONFIG} and {WEIGHTS}, as checkpoints.router.save writes them")
    try:
        config = json.loads((folder / CONFIG).read_text())
        got = config["format"]
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{folder / CONFIG}: got no router's JSON, expected what checkpoints.router.save writes"
        ) from None
    if got != FORMAT or config.get("kind") not in KINDS:
        raise UserError(
            f"{folder / CONFIG}: got format {got!r} and kind {config.get('kind')!r}, expected {FORMAT!r} and one of "
            f"{', '.join(KINDS)}"
        )
    if missing := {"settings", "sizes", "experts", "base"} - set(config):
        raise UserError(f"{folder / CONFIG}: got no {', '.join(sorted(missing))}, expected all that save writes")
    return config


def _check_experts(folder: Path, wanted: list[dict[str, str]], experts: Sequence[Adapter | None]) -> None:
    got, want = [_digest(e) for e in experts], [e["digest"] for e in wanted]
    if got == want:
        return
    names, expected = ", ".join(map(_name, experts)), ", ".join(e["name"] for e in wanted)
    if sorted(got) == sorted(want):
        raise UserError(f"{folder}: got the experts {names}, expected the order it was trained with: {expected}")
    if len(got) != len(want):
        raise UserError(f"{folder}: got {len(got)} experts ({names}), expected the {len(want)} it knows: {expected}")
    at = next(i for i, (one, other) in enumerate(zip(got, want, strict=True)) if one != other)
    raise UserError(
        f"{folder}: got {_name(experts[at])} of content {got[at]} as expert {at}, expected {wanted[at]['name']} of "
        f"content {want[at]}: it is another adapter, or another version of it, than the router was trained with"
    )


def _tensors(folder: Path, sizes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    try:
        tensors = safetensors.numpy.load((folder / WEIGHTS).read_bytes())
    except safetensors.SafetensorError as e:
        raise UserError(f"{folder / WEIGHTS}: got no whole safetensors file ({e}); save the router again") from None
    found = {name: list(value.shape) for name, value in tensors.items()}
    for name in sorted(found.keys() | sizes.keys()):
        got, want = found.get(name), sizes.get(name)
        if got != want:
            raise UserError(f"{folder / WEIGHTS}: got {name} of shape {got}, expected {want}, as {CONFIG} says")
    return tensors


def _settings(folder: Path, config: dict) -> dict[str, Any]:
    settings = dict(config["settings"])
    known = {f.name for f in dataclasses.fields(KINDS[config["kind"]])} - set(_DATA)
    if settings.keys() != known:
        raise UserError(f"{folder / CONFIG}: got settings {sorted(settings)}, expected {sorted(known)}")
    if "rule" in settings:
        settings["rule"] = Rule(**settings["rule"])
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}


def _name(expert: Adapter | None) -> str:
    return _BASE if expert is None else expert.name


def _digest(expert: Adapter | None) -> str:
    return _BASE if expert is None else adapter_digest(expert)
