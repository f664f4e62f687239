"""The one new adapter that a fine-tuning run trains: its kind, what of it trains, the loss, and what comes out."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters import lora
from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.bank import Bank
from molora_jax.adapters.fresh import ALL_LINEAR, fresh
from molora_jax.adapters.gate import PUBLISHED, GateConfig
from molora_jax.adapters.route import Route
from molora_jax.adapters.spec import BankSpec, new_bank, pack, projection_shape, site_name, unpack, write
from molora_jax.config import ModelConfig, UserError
from molora_jax.data.batch import Batch
from molora_jax.models import transformer
from molora_jax.training import dora
from molora_jax.training.batch import layout
from molora_jax.training.objective import Sums, next_token_loss
from molora_jax.training.optimiser import Group
from molora_jax.training.step import Loss
from molora_jax.typing import Array, Float, Params

KINDS = ("lora", "rslora", "dora", "gated", "equal")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """What kind of adapter is trained.

    Attributes:
      kind: `gated` has the gates of `gate`; `equal` is plain LoRA with as many parameters as `gated` would have, its
        rank raised by turns at the sites.
      rank: R of every site.
      alpha: numerator of the scale, α/R or α/√R; by default it makes the scale 2.
      sites: projections of every layer.
      share: which sites listen to one core of a gate (`adapters.fresh`).
      gate: of the kinds `gated` and `equal`.
    """

    kind: Literal["lora", "rslora", "dora", "gated", "equal"] = "lora"
    rank: int = 16
    alpha: float | None = None
    sites: tuple[str, ...] = ALL_LINEAR
    share: Literal["matrix", "input", "layer"] = "matrix"
    gate: GateConfig = GateConfig()

    def __post_init__(self):
        if self.kind not in KINDS:
            raise UserError(f"adapter: got kind {self.kind!r}, expected one of {', '.join(KINDS)}")
        if self.share not in ("matrix", "input", "layer"):
            raise UserError(f"adapter: got share {self.share!r}, expected matrix, input or layer")
        if self.rank < 1:
            raise UserError(f"adapter: got rank {self.rank}, expected at least 1")
        odd = [site for site in self.sites if site not in ALL_LINEAR]
        if odd or not self.sites:
            raise UserError(f"adapter: got sites {self.sites}, expected some of {', '.join(ALL_LINEAR)}")


PLAIN = ("lora", "rslora", "dora", "equal")
GATES = {
    "mamba": GateConfig(),
    "malora": PUBLISHED["malora"],
    "gru": GateConfig(kind="gru"),
    "lstm": GateConfig(kind="lstm"),
    "linear": GateConfig(kind="linear"),
    "toplora": PUBLISHED["toplora"],
    "gatera": PUBLISHED["gatera"],
    "scalar": PUBLISHED["scalar"],
}


def named(kind: str, **how) -> AdapterConfig:
    """The adapter of one of the names in `PLAIN` and `GATES`; `equal` has the parameters of `mamba`.

    Args:
      how: fields of `AdapterConfig`.
    """
    if kind in PLAIN:
        return AdapterConfig(kind=kind, **how)
    if kind not in GATES:
        raise UserError(f"config: got {kind!r}, expected one of {', '.join((*PLAIN, *GATES))}")
    return AdapterConfig(kind="gated", gate=GATES[kind], **how)


def new(cfg: ModelConfig, params: Params, config: AdapterConfig, name: str, *, seed: int = 0) -> Adapter:
    """An adapter of that kind which changes nothing yet; of gates that start as published, because B is zero."""
    gate = config.gate if config.kind in ("gated", "equal") else None
    scale = 2.0 if config.alpha is None else config.alpha / config.rank
    if config.kind == "rslora":
        scale = 2.0 if config.alpha is None else config.alpha / math.sqrt(config.rank)
    how = dict(sites=config.sites, rslora=config.kind == "rslora", seed=seed)
    found = fresh(cfg, params, name, rank=config.rank, gate=gate, share=config.share, **how)
    if config.kind == "equal":
        found = fresh(cfg, params, name, rank=equal_ranks(params, config, found), **how)
    scaled = lambda w: dataclasses.replace(w, alpha=scale * (math.sqrt(w.rank) if w.rslora else w.rank))
    sites = {path: tuple(map(scaled, column)) for path, column in found.sites.items()}
    found = dataclasses.replace(found, sites=sites)
    return _with_magnitudes(params, found) if config.kind == "dora" else found


def equal_ranks(params: Params, config: AdapterConfig, gated: Adapter) -> dict[str, int]:
    """The rank of each site at which plain LoRA has the parameters of `gated`, to half the price of one more
    rank at the cheapest site."""
    left = count(gated) - count(dataclasses.replace(gated, gate=None, gates=()))
    depth = len(next(iter(gated.sites.values())))
    price = {site: depth * sum(projection_shape(params, site)) for site in config.sites}
    ranks = dict.fromkeys(config.sites, config.rank)
    cheapest = min(price, key=price.get)
    while fitting := [site for site in ranks if price[site] <= left] or [cheapest] * (price[cheapest] < 2 * left):
        site = min(fitting, key=ranks.get)
        ranks[site] += 1
        left -= price[site]
    return ranks


def count(adapter: Adapter) -> int:
    """Parameters that train."""
    parts = [v for _, _, w in adapter.weights() for v in (w.a, w.b, w.magnitude, w.bias) if v is not None]
    return sum(leaf.size for leaf in parts) + gate_count(adapter)


def gate_count(adapter: Adapter) -> int:
    """Those of its gates."""
    return sum(leaf.size for group in adapter.gates for core in group.cores for leaf in jax.tree.leaves(core))


def _with_magnitudes(params: Params, adapter: Adapter) -> Adapter:
    """DoRA that changes nothing yet: m = ‖W‖."""

    def column(path, updates):
        weight = params["layers"]
        for key in path[1:]:
            weight = weight[key]
        norms = (lora.norms(jnp.asarray(weight["weight"][i]), u.a, u.b, u.scale) for i, u in enumerate(updates))
        return tuple(dataclasses.replace(u, magnitude=np.asarray(n)) for u, n in zip(updates, norms, strict=True))

    return dataclasses.replace(adapter, sites={path: column(path, found) for path, found in adapter.sites.items()})


def tree(params: Params, adapter: Adapter, *, unroll: bool = False) -> dict[str, Any]:
    """What a trainer takes apart: the frozen base and a bank of the one adapter; its magnitudes, where it has them.

    Args:
      unroll: `params` is taken apart into layers, which `loss` then unrolls: on a CPU a step takes 0.8 × the time of
        scanned ones, since nothing is copied into and out of stacks. DoRA keeps the stacks, whose norms it needs.
    """
    spec = BankSpec.holding([adapter])
    bank = write(new_bank(spec, params), 0, pack(spec, params, adapter))
    if spec.magnitudes:
        return {"params": params, "bank": bank, "magnitudes": dora.magnitudes(params, bank)}
    unroll = unroll and isinstance(params["layers"], dict)
    return {"params": transformer.unstack(params) if unroll else params, "bank": bank}


def groups(adapter: Adapter, *, rate: float, gate_rate: float, decay: float = 0.0) -> tuple[Group, ...]:
    """What of it trains, and how fast; decay is for the factors alone."""
    found = [Group(name="adapters", paths=("bank.*.[ab]",), rate=rate, decay=decay)]
    if adapter.gates:
        found.insert(0, Group(name="gates", paths=("bank.layers.gates.*",), rate=gate_rate))
    if any(w.magnitude is not None for _, _, w in adapter.weights()):
        found.append(Group(name="magnitudes", paths=("magnitudes.*",), rate=rate))
    return tuple(found)


def loss(cfg: ModelConfig, *, remat: bool = False) -> Loss:
    """The next-token loss of a tree as `tree` makes it, every token with the adapter; `remat` as `decoder` has it."""
    decode = decoder(cfg, remat=remat)

    def of(tree: dict[str, Any], batch: Batch, key: Array) -> Sums:
        return next_token_loss(cfg, tree["params"], decode(tree, batch), batch)

    return of


def decoder(
    cfg: ModelConfig, *, remat: bool = False, route: Callable[[Any], Route] | None = None
) -> Callable[[dict[str, Any], Any], Float[Array, "N D"]]:
    """The output of the decoder of a tree as `tree` makes it, at all tokens of a batch.

    Args:
      remat: computes each layer once more in the backward pass, instead of keeping what it computed.
      route: of a batch, as `experience.replayed` gives it; by default every token has the bank's first adapter.
    """

    def of(tree: dict[str, Any], batch: Any) -> Float[Array, "N D"]:
        bank, tokens = _bank(tree), batch.tokens.reshape(-1)
        if isinstance(tree["params"]["layers"], list) and bank.stacked:
            bank = _unrolled(bank)
        own = Route.of(jnp.zeros(tokens.shape, jnp.int32)) if route is None else route(batch)
        out = transformer.apply(cfg, tree["params"], tokens, layout(batch), bank=bank, route=own, remat=remat)
        return out.hidden

    return of


def _bank(tree: dict[str, Any]):
    if "magnitudes" not in tree:
        return tree["bank"]
    return dora.decomposed(tree["params"], tree["bank"], tree["magnitudes"])


def _unrolled(bank: Bank) -> Bank:
    """The same bank, a dict a layer; by one split, whose gradient is one concatenation."""
    leaves, structure = jax.tree.flatten(bank.layers)
    parts = [jax.lax.split(leaf, [1] * leaf.shape[0]) for leaf in leaves]
    layers = [structure.unflatten([part[0] for part in layer]) for layer in zip(*parts, strict=True)]
    return dataclasses.replace(bank, layers=layers)


def trained(tree: dict[str, Any], adapter: Adapter) -> Adapter:
    """The adapter with the values of a tree that has been trained; `adapter` is the one that `tree` was made of."""
    return unpack(_bank(tree), 0, tree["params"], adapter)


def ranks(adapter: Adapter) -> dict[str, int]:
    """Rank of each site."""
    return {site_name(path): column[0].rank for path, column in adapter.sites.items()}
