"""A bank of experts on the device: one slot each, the same low-rank shapes for all, and applying them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from molora_jax.adapters import bank_gates
from molora_jax.adapters.bank_gates import GateSpec, GateStack
from molora_jax.adapters.route import LAYER, Choice, Route
from molora_jax.config import UserError
from molora_jax.nn.layout import Layout
from molora_jax.nn.linear import linear
from molora_jax.typing import Array, Bool, Float, Int, Params
from pallas_kernels.routed_lora import routed_lora


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Site:
    """The experts of one projection. A slot whose expert leaves it alone, or that is empty, holds zeros.

    Attributes:
      a: [E R D]; experts of lower rank fill up with zeros.
      b: [E R F], rank before width: the layout that no platform pads or copies.
      scale: α/R or α/√R of each expert.
      bias: the experts' own (PEFT's `lora_bias`), where the bank has room for them.
      growth: m/‖W + s·B A‖ of each expert's DoRA, 1 without one (Liu et al. 2024, eq. 5).
    """

    a: Float[Array, "*L E R D"]
    b: Float[Array, "*L E R F"]
    scale: Float[Array, "*L E"]
    bias: Float[Array, "*L E F"] | None = None
    growth: Float[Array, "*L E F"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Whole:
    """A parameter that some experts replace as a whole (PEFT's `modules_to_save`).

    Attributes:
      values: of each expert.
      used: which experts have one; the others use the base's.
    """

    values: Float[Array, "E V D"]
    used: Bool[Array, "E"]


Layer = dict[str, dict[str, Site | GateStack]]
"""The sites of one layer by block, {"attn": {"q_proj": Site}, "mlp": …}; the "gates" of its experts; and "shared", the
sites by block of an adapter that every token has beside its expert (`adapters.shared`)."""

APART = ("gates", "shared")
"""Keys of a layer that are no blocks."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["layers", "ends", "whole"], meta_fields=["gates"])
@dataclasses.dataclass(frozen=True)
class Bank:
    """E slots of experts; made by `adapters.spec.new_bank`, filled by `adapters.library`.

    Attributes:
      layers: as the model's: a dict of stacks, or a list of dicts.
      ends: "embed" and "head", where experts adapt them.
      whole: "embed" and "head", where experts replace them.
      gates: what token-dependent scales there are.
    """

    layers: Layer | list[Layer]
    ends: dict[str, Site] = dataclasses.field(default_factory=dict)
    whole: dict[str, Whole] = dataclasses.field(default_factory=dict)
    gates: GateSpec | None = None

    @property
    def stacked(self) -> bool:
        return isinstance(self.layers, dict)

    def at(self, layer: int) -> Layer:
        """The sites of one layer."""
        return jax.tree.map(lambda leaf: leaf[layer], self.layers) if self.stacked else self.layers[layer]


def adapt(y: Float[Array, "F N"], x: Float[Array, "D N"], site: Site, choice: Choice) -> Float[Array, "F N"]:
    """growth ⊙ (y + Δ(x)): what a projection y = W x becomes, before its bias; columns, as in the decoder.

    Δ(x) = g · s_e · (B_e A_e x + bias_e) of the chosen expert, or the mixture Σ_e w_e Δ_e(x). A token without an
    expert keeps y to the bit.
    """
    y = y + update(x, site, choice)
    if site.growth is None:
        return y
    if choice.ids is None:
        raise UserError("route: got weights for a bank with DoRA, expected ids: its norm belongs to one expert alone")
    growth = jnp.where((choice.ids >= 0)[:, None], site.growth[jnp.maximum(choice.ids, 0)], 1)
    return (y * growth.T).astype(y.dtype)


def update(x: Float[Array, "D N"], site: Site, choice: Choice) -> Float[Array, "F N"]:
    """Δ(x) of `adapt`."""
    if choice.factored:
        return _factored(x, site, choice)
    route, through = (choice.weights, None) if choice.ids is None else (choice.ids, choice.weights)
    delta = routed_lora(x.T, site.a, site.b, route, site.scale, weights=through, gate=choice.gate, rank_major=True).T
    if site.bias is None:
        return delta
    bias = site.bias * site.scale[:, None].astype(site.bias.dtype)
    if choice.ids is None:
        own = choice.weights @ bias
    else:
        own = jnp.where((choice.ids >= 0)[:, None], bias[jnp.maximum(choice.ids, 0)], 0)
        if choice.weights is not None:
            through = jnp.where((choice.ids >= 0)[:, None], choice.weights @ bias, 0)
            own = own + (through - jax.lax.stop_gradient(through))
    own = own if choice.gate is None else own * choice.gate[:, None]
    return delta + own.T.astype(delta.dtype)


def _factored(x, site: Site, choice: Choice) -> Float[Array, "F N"]:
    if choice.ids is not None or site.bias is not None:
        raise UserError("route: got ids or biases for a mixture of factors, expected weights of experts without bias")
    experts, rank, _ = site.a.shape
    eye = jnp.broadcast_to(jnp.eye(rank, dtype=site.a.dtype), (experts, rank, rank))
    low = routed_lora(x.T, site.a, eye, choice.weights, jnp.ones_like(site.scale), rank_major=True)
    return routed_lora(low, eye, site.b, choice.weights, site.scale, gate=choice.gate, rank_major=True).T


def everyone(x: Float[Array, "D N"], site: Site) -> Float[Array, "F N"]:
    """s · B A x of the one adapter of a shared site."""
    low = linear(x, site.a[0])
    return linear(low, site.b[0].T) * site.scale[0].astype(x.dtype)


class LayerExperts:
    """The experts of one layer while it is traced: takes its decisions, applies them, keeps what was decided.

    `trace` has the choices by decision, `scales` the gates' λ by site.

    A router that decides once a layer reads the attention's input if any expert adapts the attention, else the MLP's;
    one that decides for each site reads the site's own input.
    """

    def __init__(self, sites: Layer, route: Route, gates: GateSpec | None, layout: Layout, memory: dict[str, Params]):
        """`memory` is the gates' state of the layout's rows in this layer; {} in a `Dense` layout."""
        self.sites, self.route, self.gates, self.layout, self.memory = sites, route, gates, layout, memory
        self.trace: dict[str, Choice] = {}
        self.scales: dict[str, Array] = {}

    def see(self, block: str, x: Float[Array, "D N"]) -> None:
        """Shows the input of a block ("attn", then "mlp")."""
        self._scale(block, x)
        if self.sites.get(block) and LAYER not in self.trace:
            router = self.route.router
            if LAYER in self.route.choices if router is None else not router.per_site:
                self.trace[LAYER] = self._decide(LAYER, x, None)

    def project(self, block: str, name: str, y: Float[Array, "F N"], x: Float[Array, "D N"]) -> Float[Array, "F N"]:
        """`y` = W x with the chosen experts of that projection, and what is shared."""
        y = self._chosen(block, name, y, x)
        site = self.sites.get("shared", {}).get(block, {}).get(name)
        return y if site is None else y + everyone(x, site)

    def _chosen(self, block: str, name: str, y: Float[Array, "F N"], x: Float[Array, "D N"]) -> Float[Array, "F N"]:
        site = self.sites.get(block, {}).get(name)
        if site is None:
            return y
        key = f"{block}.{name}"
        if LAYER not in self.trace or key in self.route.choices:
            self.trace[key] = self._decide(key, x, site)
        choice = self.trace.get(key, self.trace.get(LAYER))
        self._scale(key, x)
        if key in self.scales:
            choice = bank_gates.scaled(choice, self.scales[key], site.a.shape[1])
        return adapt(y, x, site, choice)

    def _scale(self, source: str, x: Float[Array, "D N"]) -> None:
        """Runs the gates that read an input, a block's or a site's own."""
        for name, groups in (self.gates.stacks if self.gates else {}).items():
            if name.partition("/")[0] != source or groups[0][0] in self.scales:
                continue
            h = None
            if self.gates.config.reads == "h":
                own = [self.sites[block][leaf].a for block, leaf in (group[0].split(".") for group in groups)]
                h = jnp.stack([jnp.einsum("erd,dn->ner", a[:, : self.gates.rank], x) for a in own], axis=2)
            found, state = bank_gates.scales(
                self.gates, name, self.sites["gates"][name], x, h, self.layout, self.memory.get(name)
            )
            self.scales |= found
            if self.memory:
                self.memory = self.memory | {name: state}

    def _decide(self, key: str, x, site: Site | None) -> Choice:
        given = self.route.choices.get(key, self.route.choices.get(LAYER))
        router = self.route.router
        if router is None:
            if given is None:
                raise UserError(f"route: got no choice for {key}, expected ids, weights or a router")
            return given
        return router.decide(key, x, site, given, self.layout, self.route.pool)


def embed(
    bank: Bank, ids: Int[Array, "N"] | None, tokens: Int[Array, "N"], x: Float[Array, "N D"]
) -> Float[Array, "N D"]:
    """The embeddings x of `tokens` as their experts change them."""
    if "embed" not in bank.ends and "embed" not in bank.whole:
        return x
    _need_ids(ids)
    if "embed" in bank.whole:
        whole, expert = bank.whole["embed"], jnp.maximum(ids, 0)
        x = jnp.where((whole.used[expert] & (ids >= 0))[:, None], whole.values[expert, tokens], x)
    if "embed" in bank.ends:
        site = bank.ends["embed"]
        low = site.a[jnp.maximum(ids, 0), :, tokens].astype(x.dtype)  # A of a one-hot token is a column
        experts, rank, _ = site.a.shape
        eye = jnp.broadcast_to(jnp.eye(rank, dtype=low.dtype), (experts, rank, rank))
        x = adapt(x.T, low.T, dataclasses.replace(site, a=eye), Choice(ids=ids)).T
    return x


def head(
    bank: Bank, ids: Int[Array, "N"] | None, hidden: Float[Array, "D N"], scores: Float[Array, "V N"]
) -> Float[Array, "V N"]:
    """The scores of the base's head as the tokens' experts change them."""
    if "head" not in bank.ends and "head" not in bank.whole:
        return scores
    _need_ids(ids)
    if "head" in bank.whole:
        whole = bank.whole["head"]

        def own(e, scores):
            mine = whole.used[e] & (ids == e)
            project = lambda s: jnp.where(mine, linear(hidden, whole.values[e], out_dtype=s.dtype), s)
            return jax.lax.cond(jnp.any(mine), project, lambda s: s, scores)

        scores = jax.lax.fori_loop(0, len(whole.used), own, scores)
    if "head" in bank.ends:
        scores = adapt(scores, hidden.astype(scores.dtype), bank.ends["head"], Choice(ids=ids))
    return scores


def _need_ids(ids) -> None:
    if ids is None:
        raise UserError(
            "route: got no ids beforehand for a bank that adapts the embedding or the head, expected an expert for "
            "each token: a router decides inside the layers"
        )
