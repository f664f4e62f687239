"""An adapter on the host: the low-rank weights of its sites, what else it brings along, and merging it into a base."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from molora_jax.adapters import lora
from molora_jax.adapters.gate import GateConfig
from molora_jax.config import ModelConfig, UserError
from molora_jax.typing import Array, Float, Params

Path = tuple[str, ...]
"""Keys into the parameter tree of a model with stacked layers."""

EMBED, HEAD = ("embed",), ("head",)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoRAWeights:
    """The update of one projection in one layer; `lora.apply` says what it computes.

    An embedding counts as the projection of one-hot tokens: D is the vocabulary, F the model's width, and its table in
    the parameter tree is Wᵀ.

    Attributes:
      a, b: [R, D] and [F, R], in the dtype they were read in.
      alpha, rslora: give `scale`.
      magnitude: [F], DoRA's; None otherwise.
      bias: [F], the adapter's own (PEFT's `lora_bias`); None otherwise.
    """

    a: Float[np.ndarray, "R D"]
    b: Float[np.ndarray, "F R"]
    alpha: float
    rslora: bool = False
    magnitude: Float[np.ndarray, "F"] | None = None
    bias: Float[np.ndarray, "F"] | None = None

    def __post_init__(self):
        if self.a.ndim != 2 or self.b.ndim != 2 or self.a.shape[0] != self.b.shape[1] or not self.a.shape[0]:
            raise UserError(f"adapter: got A {self.a.shape} and B {self.b.shape}, expected [R, D] and [F, R], R > 0")
        for name in ("magnitude", "bias"):
            vector = getattr(self, name)
            if vector is not None and vector.shape != self.b.shape[:1]:
                raise UserError(f"adapter: got {name} {vector.shape}, expected {self.b.shape[:1]}, as B {self.b.shape}")
        if self.magnitude is not None and self.bias is not None:
            raise UserError("adapter: got a magnitude and a bias, expected one of them: DoRA has no lora_bias")

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def scale(self) -> float:
        return lora.scaling(self.alpha, self.rank, rslora=self.rslora)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GateGroup:
    """The gates that scale the updates of some sites token by token: one core a layer, with a head for each site.

    Attributes:
      sites: head k scales the update at `sites[k]`; the core reads the input of `sites[0]`, or of its update's B.
      cores: one a layer, as `gate.init` makes them; None where the sites have plain updates, or none.
    """

    sites: tuple[Path, ...]
    cores: tuple[Params | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """All that one adapter file holds; a bank is filled from `sites`.

    Every column has one entry a layer, None where the adapter leaves that layer alone; columns outside `layers` have
    one entry. Ranks, scales and kinds may differ from entry to entry.

    Attributes:
      name: free text; it never becomes part of a tensor's name or of a path.
      sites: path of a projection, without its leaf, to its updates; `EMBED` and `HEAD` are sites too, `HEAD` also of a
        model whose head is the embedding.
      full: path of a parameter, with its leaf, to values used in its place by this adapter (PEFT's `modules_to_save`).
      base: the same for values that are the base's own, which the file carries along: embeddings saved beside their
        update, biases trained in place. Of a tied model they are those of both ends.
      origin: the configuration file it was read from, which an export keeps where it still holds true.
      gate: what all gates of the adapter compute; None without gates.
      gates: a site is in one group at most; one that is in none has a plain update.
    """

    name: str
    sites: Mapping[Path, tuple[LoRAWeights | None, ...]]
    full: Mapping[Path, tuple[np.ndarray | None, ...]] = dataclasses.field(default_factory=dict)
    base: Mapping[Path, tuple[np.ndarray | None, ...]] = dataclasses.field(default_factory=dict)
    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gate: GateConfig | None = None
    gates: tuple[GateGroup, ...] = ()

    def __post_init__(self):
        if bool(self.gates) != (self.gate is not None):
            raise UserError(f"adapter {self.name!r}: got gates without a gate config, or one without gates")
        gated = [path for group in self.gates for path in group.sites]
        if len(set(gated)) < len(gated) or not all(group.sites for group in self.gates):
            raise UserError(f"adapter {self.name!r}: got a site in two gate groups, or a group without sites")
        for group in self.gates:
            for path in group.sites:
                if path[:1] != ("layers",) or len(self.sites.get(path, ())) != len(group.cores):
                    raise UserError(
                        f"adapter {self.name!r}: got {len(group.cores)} gates at {'.'.join(path)}, expected one for "
                        "each of the layers that the adapter has there"
                    )

    def weights(self) -> Iterator[tuple[Path, int, LoRAWeights]]:
        """Every update there is, with its site and layer."""
        for path, column in self.sites.items():
            yield from ((path, layer, weights) for layer, weights in enumerate(column) if weights is not None)


def merge(cfg: ModelConfig, params: Params, adapter: Adapter) -> tuple[ModelConfig, Params]:
    """The model with the adapter folded in, for serving one adapter at the base's own speed.

    `params` stays as it is: keep it to take the adapter out again without loss. Sums are in fp32 (or wider) and are
    rounded once, to the dtype of the parameter; `deviations` reports what that lost. Untouched arrays are shared.

    A tied model is untied where the adapter treats its two ends differently (it targets or replaces only one of them):
    the result then has a head of its own and the config `tied=False`, which an export writes down.

    Args:
      params: with stacked layers or a list of L layers, entirely on this process's devices.

    Raises:
      UserError: a site, shape or number of layers that the model has not, a `lora_bias` where the projection has no
        bias to hold it, or an adapter with gates.
    """
    refuse_gates(adapter, "merge")
    for path, column in adapter.base.items():
        if cfg.tied and path[:1] == HEAD:
            _check_same_ends(adapter)
            path = (*EMBED, *path[1:])
        params = _edit(params, path, column, adapter.name, _replace)
    if cfg.tied and any(path[:1] in (EMBED, HEAD) for path in (*adapter.full, *adapter.sites)):
        params = params | {"head": params["embed"]}
    for path, column in adapter.full.items():
        params = _edit(params, path, column, adapter.name, _replace)
    for path, column in adapter.sites.items():
        fold = _fold_transposed if path == EMBED else _fold
        params = _edit(params, (*path, "weight"), column, adapter.name, fold)
        biased = tuple(weights if weights is not None and weights.bias is not None else None for weights in column)
        if any(biased):
            params = _edit(params, (*path, "bias"), biased, adapter.name, _fold_bias)
    if cfg.tied and "head" in params:
        if np.array_equal(params["embed"]["weight"], params["head"]["weight"]):
            return cfg, {key: value for key, value in params.items() if key != "head"}
        cfg = dataclasses.replace(cfg, tied=False)
    return cfg, params


def refuse_gates(adapter: Adapter, what: str) -> None:
    """Raises UserError if the adapter's scale depends on the token, which no sum of weights can express.

    Args:
      what: the caller is about to do.
    """
    if adapter.gates:
        raise UserError(
            f"{what}: got adapter {adapter.name!r}, whose gates ({adapter.gate.kind}) scale the update anew for every "
            "token, expected plain LoRA; apply it beside the base, or drop the gates with "
            "dataclasses.replace(adapter, gate=None, gates=())"
        )


def unmerge(cfg: ModelConfig, params: Params, adapter: Adapter) -> tuple[ModelConfig, Params]:
    """Subtracts a plain adapter from the model that `merge` gave, in fp32 (or wider).

    For when the base is not at hand: each round trip leaves two roundings to the parameters' dtype behind. A head that
    merging gave to a tied model stays.

    Raises:
      UserError: what was merged cannot be computed back (DoRA, replaced weights).
    """
    refuse_gates(adapter, "unmerge")
    if adapter.full or adapter.base or any(weights.magnitude is not None for _, _, weights in adapter.weights()):
        raise UserError(
            f"unmerge: got adapter {adapter.name!r}, whose DoRA or replaced weights overwrite the base's, "
            "expected plain LoRA; keep the base, which merging leaves as it is"
        )
    negated = {
        path: tuple(weights and dataclasses.replace(weights, alpha=-weights.alpha) for weights in column)
        for path, column in adapter.sites.items()
    }
    return merge(cfg, params, dataclasses.replace(adapter, sites=negated))


@dataclasses.dataclass(frozen=True)
class Deviation:
    """How far one merged weight lies from the exact sum, which is taken in fp64.

    Attributes:
      site, layer: where.
      weight: largest error as a fraction of the largest merged weight.
      update: the same error as a fraction of the largest change that the adapter asked for; at 1 the update is lost.
    """

    site: Path
    layer: int
    weight: float
    update: float


def deviations(params: Params, merged: Params, adapter: Adapter) -> list[Deviation]:
    """What merging `adapter` into `params` lost to rounding, one entry a site and layer, the largest loss first."""
    found = []
    for path, layer, weights in adapter.weights():
        at = (*path, "weight")
        own = next((kind[at][layer] for kind in (adapter.full, adapter.base) if at in kind), None)
        source = ("embed", "weight") if path == HEAD and "head" not in params else at
        before = np.asarray(own if own is not None else parameter(params, source, layer)).astype(np.float64)
        exact = lora.fold(before, *_factors(weights), transposed=path == EMBED)
        error = np.abs(np.asarray(parameter(merged, at, layer)).astype(np.float64) - exact).max()
        update = np.abs(exact - before).max()
        found.append(Deviation(path, layer, error / np.abs(exact).max(), error / update if update else 0.0))
    return sorted(found, key=lambda deviation: -deviation.update)


def _factors(weights: LoRAWeights):
    return weights.a, weights.b, weights.scale, weights.magnitude


def _fold(weight: np.ndarray, weights: LoRAWeights, *, transposed: bool = False) -> np.ndarray:
    shape = (weights.b.shape[0], weights.a.shape[1])
    _check_shape(weight, shape[::-1] if transposed else shape)
    return lora.fold(weight, *_factors(weights), transposed=transposed)


def _fold_transposed(weight: np.ndarray, weights: LoRAWeights) -> np.ndarray:
    return _fold(weight, weights, transposed=True)


def _fold_bias(bias: np.ndarray, weights: LoRAWeights) -> np.ndarray:
    _check_shape(bias, weights.bias.shape)
    acc = np.promote_types(bias.dtype, np.float32)
    return bias.astype(acc) + acc.type(weights.scale) * weights.bias.astype(acc)


def _replace(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    _check_shape(old, new.shape)
    return new


def _check_shape(leaf: np.ndarray, shape: tuple[int, ...]) -> None:
    if leaf.shape != shape:
        raise UserError(f"got weights for shape {shape}, expected {leaf.shape}: it was made for another base")


def _check_same_ends(adapter: Adapter) -> None:
    ends = [adapter.base[(*end, "weight")][0] for end in (EMBED, HEAD) if (*end, "weight") in adapter.base]
    if not np.array_equal(ends[0], ends[-1]):
        raise UserError(
            f"adapter {adapter.name!r}: got base weights for the head other than for the embedding, "
            "expected equal ones: the model ties them"
        )


def parameter(params: Params, path: Path, layer: int) -> Array:
    """What lies at a path, leaf included, in one layer of stacked or unrolled parameters."""
    if path[0] != "layers":
        return _get(params, path)
    if isinstance(params["layers"], list):
        return _get(params["layers"][layer], path[1:])
    return _get(params, path)[layer]


def _get(tree: Params, path: Path) -> Array:
    for key in path:
        tree = tree[key]
    return tree


def _set(tree: Params, path: Path, value: Callable[[Array], Array]) -> Params:
    """`tree` with `value(leaf)` for the leaf at `path`; the dicts on the way are copied."""
    key, *rest = path
    return tree | {key: _set(tree[key], rest, value) if rest else value(tree[key])}


def _edit(params: Params, path: Path, column: tuple, name: str, change: Callable[[np.ndarray, Any], np.ndarray]):
    """`params` with `change(leaf, entry)`, rounded to the leaf's dtype, in the layers that have an entry."""
    listed = path[0] == "layers" and isinstance(params["layers"], list)
    where = f"adapter {name!r} at {'.'.join(path)}"

    def edited(leaf: Array, entries: tuple, *, stacked: bool) -> Array:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise UserError(f"{where}: got a parameter spread over processes, expected one of this process alone")
        rows = np.asarray(leaf) if stacked else np.asarray(leaf)[None]
        _check_layers(where, entries, len(rows))
        try:
            new = [row if e is None else change(row, e).astype(row.dtype) for row, e in zip(rows, entries, strict=True)]
        except UserError as e:
            raise UserError(f"{where}: {e}") from None
        new = np.stack(new) if stacked else new[0]
        return jax.device_put(new, leaf.sharding) if isinstance(leaf, jax.Array) else new

    try:
        if not listed:
            return _set(params, path, lambda leaf: edited(leaf, column, stacked=path[0] == "layers"))
        _check_layers(where, column, len(params["layers"]))
        layers = [
            layer if entry is None else _set(layer, path[1:], lambda leaf, e=entry: edited(leaf, (e,), stacked=False))
            for layer, entry in zip(params["layers"], column, strict=True)
        ]
        return params | {"layers": layers}
    except KeyError:
        hint = "; lora_bias needs a projection with a bias to be merged into" if path[-1] == "bias" else ""
        raise UserError(f"{where}: got weights for a parameter that the model has not{hint}") from None


def _check_layers(where: str, column: tuple, layers: int) -> None:
    if len(column) != layers:
        raise UserError(f"{where}: got {len(column)} layers, expected the model's {layers}")
