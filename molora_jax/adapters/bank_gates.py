"""The gates of a bank: the cores of all its experts by the input they read, and the scales they give each token.

Every core reads every token, whichever expert is chosen: its state then does not depend on the route, and an expert
that is chosen again has missed nothing.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters import gate
from molora_jax.adapters.adapter import Adapter, GateGroup
from molora_jax.adapters.gate import GateConfig
from molora_jax.adapters.route import Choice
from molora_jax.config import UserError
from molora_jax.nn.layout import Dense, Layout
from molora_jax.typing import Array, Bool, Float, Int, Params

READS = {
    "attn.q_proj": "attn",
    "attn.k_proj": "attn",
    "attn.v_proj": "attn",
    "attn.o_proj": "attn.o_proj",
    "mlp.gate_proj": "mlp",
    "mlp.up_proj": "mlp",
    "mlp.down_proj": "mlp.down_proj",
}
"""The input that each projection reads: a block's, shared by several, or its own; in the order in which they run."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class GateSpec:
    """What gates a bank has room for.

    Attributes:
      config: of all of them.
      rank: R of the updates they scale.
      groups: the sites that listen to one core, whose first one's input it reads.
      ablation: `reset` reads every token as if it were the first, to see what the memory does (`adapters.ablation`).
    """

    config: GateConfig
    rank: int
    groups: tuple[tuple[str, ...], ...]
    ablation: Literal["reset"] | None = None

    def __post_init__(self):
        sites = [site for group in self.groups for site in group]
        if twice := sorted({site for site in sites if sites.count(site) > 1}):
            raise UserError(
                f"bank: got gates that group {', '.join(twice)} with other sites or in another order in different "
                "experts, expected one group for each site: make a bank for each kind"
            )
        inputs = list(dict.fromkeys(READS.values()))
        for group in self.groups:
            if early := [site for site in group if inputs.index(READS[site]) < inputs.index(READS[group[0]])]:
                raise UserError(
                    f"bank: got gates of {early[0]} that read the input of {group[0]}, which comes later, expected the "
                    "first site of a group to run first"
                )

    @property
    def stacks(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        """Groups that run as one scan, those with one input and equally many listeners, by a name for them."""
        found: dict[str, list[tuple[str, ...]]] = {}
        for group in self.groups:
            found.setdefault(f"{READS[group[0]]}/{len(group)}", []).append(group)
        return {name: tuple(groups) for name, groups in found.items()}

    @classmethod
    def holding(cls, adapters: Iterable[Adapter], name) -> "GateSpec | None":
        """The spec of the gates that `adapters` have; `name` of a path is its site's.

        Raises:
          UserError: they differ in what they compute or in the rank they scale, for which a bank has no room.
        """
        gated = [adapter for adapter in adapters if adapter.gates]
        if not gated:
            return None
        ranks = {
            adapter.sites[path][i].rank
            for adapter in gated
            for group in adapter.gates
            for path in group.sites
            for i, core in enumerate(group.cores)
            if core is not None
        }
        configs = {adapter.gate for adapter in gated}
        if len(configs) > 1 or len(ranks) > 1:
            raise UserError(
                f"bank: got gates of {len(configs)} configs over the ranks {sorted(ranks)}, expected one of either: "
                "make a bank for each kind"
            )
        groups = {tuple(map(name, group.sites)): None for adapter in gated for group in adapter.gates}
        return cls(configs.pop(), ranks.pop(), tuple(groups))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GateStack:
    """The cores of the G groups of a stack, for all E experts.

    Attributes:
      cores: leaves [E G ...], as `gate.init` makes them.
      used: experts without a core there have a scale of 1.
    """

    cores: Params
    used: Bool[Array, "*L E G"]


def empty(spec: GateSpec, lead: tuple[int, ...], widths: Mapping[str, int], make) -> dict[str, GateStack]:
    """Stacks without any core; `lead` is E, after L where layers are stacked; `widths` of the sites' inputs."""

    def stack(groups: tuple[tuple[str, ...], ...]) -> GateStack:
        sizes = dict(d_in=widths[groups[0][0]], rank=spec.rank, heads=len(groups[0]))
        axes = (*lead, len(groups))
        cores = jax.tree.map(lambda v: make((*axes, *v.shape), v.dtype), gate.abstract(spec.config, **sizes))
        return GateStack(cores, make(axes, bool))

    return {name: stack(groups) for name, groups in spec.stacks.items()}


def rows(spec: GateSpec, slot: Mapping[str, GateStack], adapter: Adapter, name, layer: int) -> dict[str, GateStack]:
    """One layer's part of a slot, on the host; `slot` has the shapes of all E."""
    cores = {tuple(map(name, group.sites)): group.cores[layer] for group in adapter.gates}
    filled = {}
    for key, groups in spec.stacks.items():
        row = jax.tree.map(lambda v: np.zeros(v.shape[1:], v.dtype), slot[key])
        for i, group in enumerate(groups):
            if cores.get(group) is not None:
                jax.tree.map(lambda to, value, i=i: to.__setitem__(i, value), row.cores, cores[group])
                row.used[i] = True
        filled[key] = row
    return filled


def unpacked(
    spec: GateSpec | None, layers: Sequence[Mapping[str, GateStack]], adapter: Adapter, name
) -> tuple[GateGroup, ...]:
    """The groups of `adapter` with the values of a slot, given layer by layer on the host: the inverse of `rows`.

    Raises:
      UserError: the bank has no such groups.
    """
    places = {
        group: (key, i) for key, groups in (spec.stacks if spec else {}).items() for i, group in enumerate(groups)
    }
    found = []
    for group in adapter.gates:
        names = tuple(map(name, group.sites))
        if names not in places:
            raise UserError(
                f"adapter {adapter.name!r}: got a bank without gates at {', '.join(names)}, expected the one that it "
                "was packed for"
            )
        key, i = places[names]
        take = lambda leaf, own, i=i: np.asarray(leaf[i]).astype(own.dtype)
        cores = (c and jax.tree.map(take, row[key].cores, c) for row, c in zip(layers, group.cores, strict=True))
        found.append(dataclasses.replace(group, cores=tuple(cores)))
    return tuple(found)


def new_state(spec: GateSpec, layers: dict | list, slots: int) -> dict[str, Params] | list[dict[str, Params]]:
    """What the cores remember of `slots` requests before their first tokens: leaves [slots E·G ...] of each layer."""

    def one(stacks: Mapping[str, GateStack]) -> dict[str, Params]:
        return {name: gate.new_state(spec.config, _flat(stack.cores), slots) for name, stack in stacks.items()}

    return jax.vmap(one)(layers["gates"]) if isinstance(layers, dict) else [one(layer["gates"]) for layer in layers]


def scales(
    spec: GateSpec,
    name: str,
    stack: GateStack,
    x: Float[Array, "D N"],
    h: Float[Array, "N E G R"] | None,
    layout: Layout,
    state: Params | None,
) -> tuple[dict[str, Float[Array, "N E *R"]], Params | None]:
    """λ of each token under every expert, by site, and the state of the layout's rows after their last tokens.

    Args:
      h: what A gives, for cores that read that.
      state: of the rows, leaves [B E·G ...]; None in a `Dense` layout.
    """
    experts, count = stack.used.shape
    place = _places(layout)
    read = place.rows(x.T) if h is None else place.rows(h.reshape(len(h), experts * count, -1))
    reset = jnp.ones_like(place.reset) if spec.ablation == "reset" else place.reset
    lam, state = gate.apply_stack(spec.config, _flat(stack.cores), read, state, valid=place.valid, reset=reset)
    lam = place.tokens(lam)
    lam = lam.reshape(len(lam), experts, count, *lam.shape[2:])
    found = {}
    for g, group in enumerate(spec.stacks[name]):
        for head, site in enumerate(group):
            own = lam[:, :, g, head]
            used = stack.used[:, g].reshape(1, -1, *(1,) * (own.ndim - 2))
            found[site] = jnp.where(used, own, 1)
    return found, state


def scaled(choice: Choice, lam: Float[Array, "N E *R"], rank: int) -> Choice:
    """The choice with its updates scaled by λ of the experts chosen; `rank` is the bank's.

    Weights beside ids are for the gradient alone, of Σ_e w_e λ_e Δ_e; what applies them knows the λ of the chosen one.
    Of diagonal gates it cannot know the others', and gives no such gradient (`training.mixture` refuses to train it).
    """
    if choice.factored:
        raise UserError(
            "route: got a mixture of factors over gated experts, expected one of products: as soft, or hard"
        )
    if choice.ids is None:
        if lam.ndim == 3:
            raise UserError("route: got weights for experts with diagonal gates, expected ids, or scalar gates")
        return dataclasses.replace(choice, weights=choice.weights * lam)
    own = jnp.take_along_axis(lam, jnp.maximum(choice.ids, 0).reshape(-1, 1, *(1,) * (lam.ndim - 2)), axis=1)[:, 0]
    if own.ndim == 2:
        own = jnp.pad(own, ((0, 0), (0, rank - own.shape[1])), constant_values=1)
    weights = None if lam.ndim == 3 else choice.weights
    if weights is not None:
        ratio = lam / jnp.where(own == 0, 1, own)[:, None]
        weights = weights * jax.lax.stop_gradient(ratio).astype(weights.dtype)
    if choice.gate is not None:
        own = own * choice.gate.reshape(-1, *(1,) * (own.ndim - 1))
    return dataclasses.replace(choice, gate=own, weights=weights)


def _flat(cores: Params) -> Params:
    """[E G ...] as [E·G ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), cores)


@dataclasses.dataclass(frozen=True)
class _Places:
    """Where the N flat tokens lie in rows [B T], for a recurrence.

    Attributes:
      token: [B T], the token at each place; None where the list is row-major already.
      place: [N], the place of each token; None likewise.
    """

    shape: tuple[int, int]
    token: Int[Array, "B T"] | None
    place: Int[Array, "N"] | None
    valid: Bool[Array, "B T"]
    reset: Bool[Array, "B T"]

    def rows(self, v: Float[Array, "N *D"]) -> Float[Array, "B T *D"]:
        v = v if self.token is None else v[self.token.reshape(-1)]
        return v.reshape(*self.shape, *v.shape[1:])

    def tokens(self, v: Float[Array, "B T *D"]) -> Float[Array, "N *D"]:
        v = v.reshape(-1, *v.shape[2:])
        return v if self.place is None else v[self.place]


def _places(layout: Layout) -> _Places:
    if isinstance(layout, Dense):
        before = jnp.pad(layout.segments, ((0, 0), (1, 0)))[:, :-1]
        return _Places(layout.shape, None, None, layout.valid, layout.segments != before)
    count = layout.slots.shape[0]
    tokens = layout.positions.shape[0]
    length = 1 if layout.lanes.shape[1] == 1 else tokens  # decoding reads one token a row
    mine = layout.rows == jnp.arange(count)[:, None]
    begin = jnp.sum(layout.rows < jnp.arange(count)[:, None], axis=1)
    t = jnp.arange(length)
    valid = t < jnp.sum(mine, axis=1)[:, None]
    token = jnp.minimum(begin[:, None] + t, tokens - 1)
    row = jnp.minimum(layout.rows, count - 1)
    place = jnp.where(layout.rows < count, row * length + jnp.arange(tokens) - begin[row], 0)
    reset = valid & (layout.positions[token] == 0)
    return _Places((count, length), token, place, valid, reset)
