"""The fixed shape of a bank, and what an adapter becomes in one of its slots."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters import bank_gates, lora
from molora_jax.adapters.adapter import EMBED, HEAD, Adapter, LoRAWeights, Path, parameter
from molora_jax.adapters.bank import Bank, Layer, Site, Whole
from molora_jax.adapters.bank_gates import GateSpec
from molora_jax.config import UserError
from molora_jax.typing import Array, Params

ENDS = ("embed", "head")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BankSpec:
    """What a bank has room for. Inside it no swap compiles anything; `str()` and `size` tell before it is made.

    Attributes:
      slots: E, experts that are on the device at once.
      ranks: highest rank of each site that experts may adapt, by its name: "attn.q_proj", "embed", "head".
      biases: room for the experts' own biases (PEFT's `lora_bias`).
      magnitudes: room for DoRA.
      whole: which of "embed" and "head" experts may replace (PEFT's `modules_to_save`); costs E copies of it.
      gates: room for token-dependent scales (`adapters.gate`), of one kind and rank.
      dtype: of the factors.
    """

    slots: int
    ranks: Mapping[str, int]
    biases: bool = False
    magnitudes: bool = False
    whole: tuple[str, ...] = ()
    gates: GateSpec | None = None
    dtype: Any = jnp.float32

    def __post_init__(self):
        if self.slots < 1:
            raise UserError(f"bank: got {self.slots} slots, expected at least 1")
        if self.gates and (self.biases or self.magnitudes):
            raise UserError("bank: got gates beside biases or DoRA, expected plain LoRA beside them: make two banks")

    @classmethod
    def holding(cls, adapters: Sequence[Adapter], *, slots: int | None = None, dtype=jnp.float32) -> "BankSpec":
        """The smallest spec into which each of `adapters` fits."""
        ranks: dict[str, int] = {}
        for adapter in adapters:
            for path, _, weights in adapter.weights():
                ranks[site_name(path)] = max(ranks.get(site_name(path), 0), weights.rank)
        every = [weights for adapter in adapters for _, _, weights in adapter.weights()]
        return cls(
            slots=slots or max(len(adapters), 1),
            ranks=ranks,
            biases=any(weights.bias is not None for weights in every),
            magnitudes=any(weights.magnitude is not None for weights in every),
            whole=tuple(sorted({path[0] for adapter in adapters for path in adapter.full if path[0] in ENDS})),
            gates=GateSpec.holding(adapters, site_name),
            dtype=dtype,
        )


def site_name(path: Path) -> str:
    """("layers", "attn", "q_proj") -> "attn.q_proj"."""
    return ".".join(path[1:] if path[0] == "layers" else path)


def new_bank(spec: BankSpec, params: Params, *, abstract: bool = False) -> Bank:
    """A bank of empty slots for a model with these parameters, its layers stacked or unrolled as theirs.

    Raises:
      UserError: the model has no such site.
    """
    make = jax.ShapeDtypeStruct if abstract else jnp.zeros
    stacked = isinstance(params["layers"], dict)
    lead = (_depth(params), spec.slots) if stacked else (spec.slots,)
    sites: Layer = {}
    ends = {}
    for name, rank in spec.ranks.items():
        out, width = projection_shape(params, name)
        if name in ENDS:
            ends[name] = _empty_site(spec, (spec.slots,), rank, out, width, make)
        else:
            block, leaf = name.split(".")
            sites.setdefault(block, {})[leaf] = _empty_site(spec, lead, rank, out, width, make)
    if spec.gates:
        widths = {name: projection_shape(params, name)[1] for name in spec.ranks}
        sites["gates"] = bank_gates.empty(spec.gates, lead, widths, make)
    whole = {}
    for name in spec.whole:
        shape = (spec.slots, *_leaf(params, name).shape)
        whole[name] = Whole(make(shape, spec.dtype), make((spec.slots,), bool))
    if stacked or abstract:
        return Bank(sites if stacked else [sites] * len(params["layers"]), ends, whole, spec.gates)
    copies = [sites] + [jax.tree.map(jnp.copy, sites) for _ in params["layers"][1:]]
    return Bank(copies, ends, whole, spec.gates)


def size(spec: BankSpec, params: Params) -> int:
    """Bytes of the bank."""
    leaves = jax.tree.leaves(new_bank(spec, params, abstract=True))
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)


def pack(spec: BankSpec, params: Params, adapter: Adapter) -> Bank:
    """`adapter` as one slot of a bank, on the host: the same tree without the expert axis.

    Raises:
      UserError: it does not fit the spec or the model, and what to change.
    """
    who = f"adapter {adapter.name!r}"
    _check(spec, who, adapter)
    _check_base(who, adapter, params)
    empty = new_bank(spec, params, abstract=True)
    depth = _depth(params)
    columns = {site_name(path): column for path, column in adapter.sites.items()}
    for name, column in columns.items():
        if name not in ENDS and len(column) != depth:
            raise UserError(f"{who} at {name}: got {len(column)} layers, expected the model's {depth}")
    slots = empty.layers
    slots = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape[1:], v.dtype), slots) if empty.stacked else slots[0]
    row = lambda name, slot, i: _row(
        f"{who} at {name}", slot, columns[name][i] if name in columns else None, lambda: _base(params, name, i)
    )

    def layer(i: int) -> Layer:
        blocks = {block: sites for block, sites in slots.items() if block != "gates"}
        rows = {
            block: {leaf: row(f"{block}.{leaf}", slot, i) for leaf, slot in sites.items()}
            for block, sites in blocks.items()
        }
        if spec.gates:
            rows["gates"] = bank_gates.rows(spec.gates, slots["gates"], adapter, site_name, i)
        return rows

    layers = [layer(i) for i in range(depth)]
    return Bank(
        jax.tree.map(lambda *leaves: np.stack(leaves), *layers) if empty.stacked else layers,
        {name: row(name, slot, 0) for name, slot in empty.ends.items()},
        {name: _whole(who, name, slot, adapter) for name, slot in empty.whole.items()},
        spec.gates,
    )


def unpack(bank: Bank, slot: int, params: Params, like: Adapter) -> Adapter:
    """The adapter in a slot of a bank: the inverse of `pack` and `write`, as for one that has been trained there.

    A slot does not say which of its rows are room that was left, nor how its scale came about; `like`, the adapter that
    was packed, does: name, sites, ranks, alpha, kinds and dtypes are its own, the values are the slot's. What has not
    been trained comes back to the bit; a magnitude, which a slot holds divided by a norm, to the last place.

    Args:
      params: what the adapter was packed for.

    Raises:
      UserError: the slot does not hold such an adapter.
    """
    row = _slot_of(bank, slot)
    who = f"adapter {like.name!r}"
    sites = {
        path: tuple(
            w and _weights(f"{who} at {site_name(path)}", row, params, path, i, w) for i, w in enumerate(column)
        )
        for path, column in like.sites.items()
    }
    full = {
        path: (np.asarray(row.whole[path[0]].values).astype(column[0].dtype),) for path, column in like.full.items()
    }
    layers = [row.at(i).get("gates", {}) for i in range(_depth(params))] if like.gates else []
    gates = bank_gates.unpacked(bank.gates, layers, like, site_name)
    return dataclasses.replace(like, sites=sites, full=full, gates=gates)


def _slot_of(bank: Bank, slot: int) -> Bank:
    """One slot on the host, without its expert axis."""
    take = lambda axis: lambda leaf: np.take(np.asarray(leaf), slot, axis)
    return Bank(
        jax.tree.map(take(1 if bank.stacked else 0), bank.layers),
        jax.tree.map(take(0), bank.ends),
        jax.tree.map(take(0), bank.whole),
        bank.gates,
    )


def _weights(where: str, row: Bank, params: Params, path: Path, layer: int, like: LoRAWeights) -> LoRAWeights:
    """One layer's update at a site."""
    name = site_name(path)
    try:
        site = row.ends[name] if name in ENDS else _nested(row.at(layer), name)
    except KeyError:
        raise UserError(f"{where}: got a bank without this site, expected the one that it was packed for") from None
    rank = like.rank
    if site.a.shape[0] < rank or site.scale != site.scale.dtype.type(like.scale):
        got = f"rank {site.a.shape[0]} and scale {site.scale:g}"
        raise UserError(
            f"{where}: got {got} in the slot, expected rank {rank} and scale {like.scale:g} as it was packed"
        )
    a, b = (np.asarray(v)[:rank].astype(own.dtype) for v, own in ((site.a, like.a), (site.b, like.b)))
    magnitude = like.magnitude
    if magnitude is not None:
        norm = np.asarray(lora.norms(jnp.asarray(_base(params, name, layer)), a, b.T, like.scale))
        magnitude = (site.growth * norm).astype(magnitude.dtype)
    bias = None if like.bias is None else np.asarray(site.bias).astype(like.bias.dtype)
    return dataclasses.replace(like, a=a, b=np.ascontiguousarray(b.T), magnitude=magnitude, bias=bias)


def _nested(tree, name: str):
    for key in name.split("."):
        tree = tree[key]
    return tree


def projection_shape(params: Params, name: str) -> tuple[int, int]:
    """(F, D) of a site's projection: of an embedding, that of one-hot tokens, (D, V).

    Raises:
      UserError: the model has no such site.
    """
    out, width = _leaf(params, name).shape[-2:]
    return (width, out) if name == "embed" else (out, width)


def write(bank: Bank, slot: Array, row: Bank) -> Bank:
    """The bank with `row` in a slot, what is shared as it was; jitted with the bank donated it writes in place."""
    put = lambda axis: (
        lambda old, new: jax.lax.dynamic_update_index_in_dim(old, jnp.asarray(new, old.dtype), slot, axis)
    )
    layer = lambda old, new, axis: old | {block: jax.tree.map(put(axis), old[block], new[block]) for block in new}
    pairs = lambda: zip(bank.layers, row.layers, strict=True)
    return Bank(
        layer(bank.layers, row.layers, 1) if bank.stacked else [layer(old, new, 0) for old, new in pairs()],
        jax.tree.map(put(0), bank.ends, row.ends),
        jax.tree.map(put(0), bank.whole, row.whole),
        bank.gates,
    )


def _check(spec: BankSpec, who: str, adapter: Adapter) -> None:
    for path, _, weights in adapter.weights():
        name = site_name(path)
        room = spec.ranks.get(name)
        if room is None:
            raise UserError(
                f"{who}: adapts {name}, expected one of {', '.join(spec.ranks) or 'no site'}: add it to ranks"
            )
        if weights.rank > room:
            raise UserError(f"{who}: got rank {weights.rank} at {name}, expected at most {room}: raise the bank's rank")
        if weights.bias is not None and not spec.biases:
            raise UserError(f"{who}: got a lora_bias at {name}, expected none: make the bank with biases=True")
        if weights.magnitude is not None and not spec.magnitudes:
            raise UserError(f"{who}: got DoRA at {name}, expected plain LoRA: make the bank with magnitudes=True")
    room = set(spec.gates.groups) if spec.gates else set()
    for group in adapter.gates:
        names = tuple(site_name(path) for path in group.sites)
        if names not in room or spec.gates.config != adapter.gate:
            raise UserError(
                f"{who}: got {adapter.gate.kind} gates at {', '.join(names)}, expected {spec.gates or 'none'}"
            )
        ranks = {
            adapter.sites[path][i].rank for path in group.sites for i, c in enumerate(group.cores) if c is not None
        }
        if ranks - {spec.gates.rank}:
            raise UserError(f"{who}: got gates over ranks {sorted(ranks)}, expected {spec.gates.rank}, the bank's")
    for path in adapter.full:
        if path not in ((*EMBED, "weight"), (*HEAD, "weight")) or path[0] not in spec.whole:
            raise UserError(
                f"{who}: replaces {'.'.join(path)}, expected one of {spec.whole or 'nothing'}: "
                "name embed or head in whole, and merge an adapter that replaces anything else"
            )


def _check_base(who: str, adapter: Adapter, params: Params) -> None:
    """What the file carries of the base must be this base's, be one of both rounded: all experts have one base."""
    for path, column in adapter.base.items():
        source = (*EMBED, *path[1:]) if path[:1] == HEAD and "head" not in params else path  # a tied head
        for layer, value in enumerate(column):
            if value is None:
                continue
            own = np.asarray(parameter(params, source, layer))
            if not (np.array_equal(value.astype(own.dtype), own) or np.array_equal(value, own.astype(value.dtype))):
                raise UserError(
                    f"{who}: got {'.'.join(path)} other than the base's, expected the same, for all experts share one "
                    "base: merge the adapter, or train it without biases and embeddings"
                )


def _empty_site(spec: BankSpec, lead: tuple[int, ...], rank: int, out: int, width: int, make) -> Site:
    wide = jnp.promote_types(spec.dtype, jnp.float32)
    return Site(
        a=make((*lead, rank, width), spec.dtype),
        b=make((*lead, rank, out), spec.dtype),
        scale=make(lead, wide),
        bias=make((*lead, out), spec.dtype) if spec.biases else None,
        growth=make((*lead, out), wide) if spec.magnitudes else None,
    )


def _row(where: str, slot: Site, weights: LoRAWeights | None, base) -> Site:
    """One layer's part of a slot: `slot` has the shapes of all E."""
    zeros = jax.tree.map(lambda v: np.zeros(v.shape[1:], v.dtype), slot)
    if slot.growth is not None:
        zeros = dataclasses.replace(zeros, growth=np.ones_like(zeros.growth))
    if weights is None:
        return zeros
    width, out = slot.a.shape[-1], slot.b.shape[-1]
    if (weights.b.shape[0], weights.a.shape[1]) != (out, width):
        got = [weights.b.shape[0], weights.a.shape[1]]
        raise UserError(f"{where}: got weights for a projection {got}, expected {[out, width]}: it is of another base")
    zeros.a[: weights.rank], zeros.b[: weights.rank] = weights.a, weights.b.T
    growth = zeros.growth
    if weights.magnitude is not None:
        norm = np.asarray(lora.norms(jnp.asarray(base()), weights.a, weights.b, weights.scale))
        growth = (weights.magnitude.astype(growth.dtype) / norm).astype(growth.dtype)
    bias = zeros.bias if weights.bias is None else weights.bias.astype(zeros.bias.dtype)
    return dataclasses.replace(zeros, scale=zeros.scale.dtype.type(weights.scale), growth=growth, bias=bias)


def _whole(who: str, name: str, slot: Whole, adapter: Adapter) -> Whole:
    column = adapter.full.get((name, "weight"))
    if column is None:
        return Whole(np.zeros(slot.values.shape[1:], slot.values.dtype), np.False_)
    if column[0].shape != slot.values.shape[1:]:
        raise UserError(f"{who}: got {name} {column[0].shape}, expected {slot.values.shape[1:]}: it is of another base")
    return Whole(column[0].astype(slot.values.dtype), np.True_)


def _depth(params: Params) -> int:
    """L."""
    layers = params["layers"]
    return len(layers) if isinstance(layers, list) else jax.tree.leaves(layers)[0].shape[0]


def _leaf(params: Params, name: str) -> Array:
    """A site's weight: of all layers, or of the first where they are unrolled; a tied head is the embedding."""
    if name == "head" and "head" not in params:
        name = "embed"
    tree = params if name in ENDS else params["layers"]
    tree = tree[0] if isinstance(tree, list) else tree
    try:
        return _nested(tree, f"{name}.weight")
    except KeyError:
        raise UserError(f"bank: got site {name!r}, expected a projection of the model, as attn.q_proj") from None


def _base(params: Params, name: str, layer: int) -> Array:
    """The weight [F, D] of one layer's site."""
    if name in ENDS:
        return _leaf(params, name).T if name == "embed" else _leaf(params, name)
    if isinstance(params["layers"], list):
        return _leaf({"layers": params["layers"][layer]}, name)
    return _leaf(params, name)[layer]


__all__ = ["BankSpec", "new_bank", "pack", "site_name", "size", "unpack", "write"]
