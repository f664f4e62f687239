"""This project, as the conformance rows use it: adapters run in a bank, never merged unless that is asked for."""

import dataclasses
import functools
import importlib.util
import pathlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from experiments.conformance import xlora
from experiments.conformance.inputs import DTYPES, TOKENS, Inputs
from molora_jax.adapters import adapter as adapters
from molora_jax.adapters import merge
from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.library import Library
from molora_jax.adapters.route import Route
from molora_jax.adapters.spec import BankSpec
from molora_jax.checkpoints import hf, peft
from molora_jax.config import ModelConfig
from molora_jax.models import transformer
from molora_jax.nn.layout import dense
from molora_jax.typing import Params

_Q = ("layers", "attn", "q_proj")


@dataclasses.dataclass(frozen=True)
class Group:
    """Adapters of one base, by name."""

    cfg: ModelConfig
    params: Params
    adapters: Mapping[str, Adapter]


class Ours:
    """See `side.Side`."""

    name = "ours"

    def __init__(self, inputs: Inputs):
        self.inputs, self.said = inputs, []

    def bare(self, folder: pathlib.Path) -> np.ndarray:
        cfg, params = hf.load(folder)
        return np.asarray(_forward(cfg, params, TOKENS[None], None, None))[0]

    def load(self, folders: Mapping[str, pathlib.Path], base: str = "untied") -> Group:
        cfg, params = hf.load(self.inputs.base(base), dtype=DTYPES[base])
        found = {}
        for name, folder in folders.items():
            found[name], report = peft.load(folder, cfg, name=name)
            self.said += report.notes
        return Group(cfg, params, found)

    def logits(self, group: Group, name: str = "x") -> np.ndarray:
        return self.mixed(dataclasses.replace(group, adapters={name: group.adapters[name]}), [name])[0]

    def mixed(self, group: Group, names: Sequence[str]) -> np.ndarray:
        library = self._library(group)
        slots = [library.acquire(name) for name in names]
        tokens = np.tile(TOKENS, (len(names), 1))
        return np.asarray(_forward(group.cfg, group.params, tokens, library.bank, np.repeat(slots, len(TOKENS))))

    def scales(self, group: Group) -> dict[str, float]:
        blocks = {"attn": "self_attn", "mlp": "mlp"}
        return {
            f"layers.{layer}.{blocks[path[1]]}.{path[2]}": weights.scale
            for path, layer, weights in group.adapters["x"].weights()
        }

    def dtypes(self, group: Group) -> set[str]:
        return {factor.dtype.name for _, _, w in group.adapters["x"].weights() for factor in (w.a, w.b)}

    def delta(self, group: Group, name: str = "x") -> np.ndarray:
        weights = group.adapters[name].sites[_Q][0]
        return weights.scale * weights.b @ weights.a

    def combine(self, group: Group, weights: Mapping[str, float], method: str) -> Group:
        parts = [group.adapters[name.rstrip("'")] for name in weights]
        made = merge.combine(parts, list(weights.values()), name="sum", method=method)
        return dataclasses.replace(group, adapters={**group.adapters, "sum": made})

    def merge(self, group: Group, folder: pathlib.Path) -> np.ndarray:
        cfg, params = adapters.merge(group.cfg, group.params, group.adapters["x"])
        hf.save(folder, cfg, params)
        return np.asarray(_forward(cfg, params, TOKENS[None], None, None))[0]

    def merged_weight(self, group: Group) -> tuple[np.ndarray, bool]:
        _, params = adapters.merge(group.cfg, group.params, group.adapters["x"])
        lost = adapters.deviations(group.params, params, group.adapters["x"])
        return _weight(params), 0 < max(deviation.update for deviation in lost) < 1

    def toggled(self, group: Group, times: int) -> np.ndarray:
        for _ in range(times):
            adapters.merge(group.cfg, group.params, group.adapters["x"])
        return _weight(group.params)

    def save(self, group: Group, folder: pathlib.Path) -> dict[str, pathlib.Path]:
        places = {name: folder / str(i) for i, name in enumerate(group.adapters)}
        for name, place in places.items():
            peft.save(place, group.cfg, group.adapters[name])
        return places

    def swap(self, group: Group, folder: pathlib.Path) -> Group:
        old, new = group.adapters["x"], peft.load(folder, group.cfg, name="x")[0]
        return dataclasses.replace(group, adapters={"x": dataclasses.replace(old, sites=new.sites)})

    def decode_xlora(self, folders: Mapping[str, pathlib.Path], base: str = "untied") -> tuple[bool, str]:
        if importlib.util.find_spec("molora_jax.adapters.mixtures") is None:
            raise NotImplementedError("there is no X-LoRA here: molora_jax.adapters.mixtures is not there")
        group = self.load(folders, base)
        bank = self._library(group).bank
        return xlora.decodes(group.cfg, group.params, bank, len(folders), TOKENS, 6)

    def _library(self, group: Group) -> Library:
        """All adapters of the group, in the slots 0, 1 and so on."""
        library = Library(BankSpec.holding(list(group.adapters.values()), dtype=_dtype(group)), group.params)
        for adapter in group.adapters.values():
            library.add(adapter)
            library.release(library.acquire(adapter.name))
        return library


def _dtype(group: Group):
    return group.params["embed"]["weight"].dtype


def _weight(params: Params) -> np.ndarray:
    return np.asarray(params["layers"]["attn"]["q_proj"]["weight"][0])


@functools.partial(jax.jit, static_argnums=0)
def _forward(cfg: ModelConfig, params: Params, tokens, bank, ids):
    route = None if bank is None else Route.of(ids)
    out = transformer.apply(cfg, params, tokens.reshape(-1), dense(*tokens.shape), bank=bank, route=route)
    return transformer.logits(cfg, params, out.hidden, bank=bank, ids=ids).reshape(*tokens.shape, -1)
