"""What is trained to compose frozen experts: a router of any kind, an adapter that all tokens share, and their loss."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from molora_jax.adapters import router_losses
from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.library import Library
from molora_jax.adapters.mixtures import mole, phatgoose, settings, soups, xlora
from molora_jax.adapters.route import LAYER, Choice, Route
from molora_jax.adapters.router import Router, new_router
from molora_jax.adapters.selection import Rule
from molora_jax.adapters.shared import without_shared
from molora_jax.adapters.spec import BankSpec, projection_shape
from molora_jax.config import ModelConfig, UserError
from molora_jax.data.batch import Batch
from molora_jax.models import transformer
from molora_jax.nn.layout import Dense
from molora_jax.training.batch import layout, next_tokens
from molora_jax.training.objective import Sums, next_token_loss
from molora_jax.training.optimiser import Group
from molora_jax.training.owned import Owned
from molora_jax.training.step import Loss
from molora_jax.typing import Array, Params

ATTENTION = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj")
RULES = {
    "hard": Rule("hard"),
    "hard_dense": Rule("hard_dense"),
    "switch": Rule("switch"),
    "gumbel": Rule("gumbel"),
    "soft": Rule("soft"),
    "top2": Rule("top_k", k=2),
}
"""Kinds with one decision a layer."""
DENSE = ("hard_dense", "gumbel")
"""Kinds that choose one expert and learn from all."""
LORAHUB = "lorahub"
"""The kind whose weights are found without gradients (`training.lorahub`)."""
FACTORED = ("smear", LORAHUB)
"""Kinds that mix the factors of the experts."""
KINDS = (*RULES, "loramoe", "mixlora", "smear", "mole", "xlora", "soup", "phatgoose", LORAHUB)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """How frozen experts are composed.

    Attributes:
      kind: of `KINDS`. `hard` is the one of Molavi et al. 2026; `hard_dense` the same choice with the gradient of the
        mixture over all experts; `top2` a softmax over the two best; the others are those of `adapters.mixtures`.
        `phatgoose` trains the gate of each expert on the tokens of its own domain.
      hidden: width of the router's hidden layer; 0 for a linear one.
      per_layer: a router for each layer; else one that all share, as released. Of the kinds in `RULES`.
      rank: of the LoRA in the attention that trains with the router and that every token has; 0 for none. `lorahub`,
        which has no gradients, has none.
      balance, z, entropy, consistency: factors of the auxiliary losses (`adapters.router_losses`); all 0 as released.
      expert_kl: factor of KL(p of the example's own expert || p of the mixture), token by token. It costs a second
        forward pass, and the scores of the whole vocabulary for all tokens at once.
      spread: standard deviation of a fresh router's scores, where its inputs have variance 1: small, so that all
        experts are nearly even at first. Of the kinds in `RULES`.
    """

    kind: Literal[KINDS] = "hard"
    hidden: int = 0
    per_layer: bool = False
    rank: int = 8
    balance: float = 0.0
    z: float = 0.0
    entropy: float = 0.0
    consistency: float = 0.0
    expert_kl: float = 0.0
    spread: float = 0.1

    def __post_init__(self):
        if self.kind not in KINDS:
            raise UserError(f"mixture: got kind {self.kind!r}, expected one of {', '.join(KINDS)}")
        if min(self.hidden, self.rank, self.balance, self.z, self.entropy, self.consistency, self.expert_kl) < 0:
            raise UserError(f"mixture: got {self}, expected no negative number")
        if self.auxiliary and self.kind not in (*RULES, "mixlora", "smear"):
            raise UserError(f"mixture: got auxiliary losses for {self.kind}, expected a kind with one decision a layer")

    @property
    def auxiliary(self) -> dict[str, float]:
        """The factors that are not 0."""
        names = ("balance", "z", "entropy", "consistency")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


def new_mixer(
    cfg: ModelConfig, params: Params, config: MixtureConfig, experts: Sequence[Adapter], *, seed: int = 0
) -> Any:
    """A router of that kind to train, its experts in the first slots of a bank of as many.

    Raises:
      UserError: a kind that cannot learn over gates of these experts.
    """
    if config.kind in DENSE and any(expert.gate is not None and expert.gate.output == "diagonal" for expert in experts):
        raise UserError(
            f"mixture: got {config.kind} over experts with diagonal gates, whose dense gradient is not known, "
            "expected another kind: hard learns from the chosen expert alone"
        )
    if config.kind in FACTORED and any(expert.gates for expert in experts):
        raise UserError(f"mixture: got {config.kind}, a mixture of factors, over gated experts, expected another kind")
    count, depth = len(experts), cfg.layers
    shapes = {site: projection_shape(params, site) for site in BankSpec.holding(experts).ranks}
    widths = {site: d for site, (_, d) in shapes.items()}
    if config.kind in RULES:
        router = _decider(cfg, config, count, seed)
        return dataclasses.replace(router, params=_scaled(router.params, config.spread))
    match config.kind:
        case "loramoe":
            return settings.loramoe(widths, count, depth, seed=seed)
        case "mixlora":
            return settings.mixlora(cfg.width, count, depth, seed=seed)
        case "smear":
            return settings.smear(cfg.width, count, depth, seed=seed)
        case "mole":
            return mole.mole({site: f for site, (f, _) in shapes.items()}, count, depth, seed=seed)
        case "xlora":
            return xlora.xlora(cfg.width, count, depth, hidden=config.hidden, seed=seed)
        case "phatgoose":
            return phatgoose.phatgoose(widths, count, depth, k=min(2, count), training=True)
        case "soup" | "lorahub":
            return soups.soup(count, depth, factored=config.kind == LORAHUB)


def _decider(cfg: ModelConfig, config: MixtureConfig, experts: int, seed: int) -> Router:
    layers = cfg.layers if config.per_layer else 0
    return new_router(cfg.width, experts, rule=RULES[config.kind], hidden=config.hidden, layers=layers, seed=seed)


def _scaled(params: Params, factor: float) -> Params:
    """The router's params with its last weights times `factor`."""
    return params | {"out": params["out"] | {"weight": params["out"]["weight"] * factor}}


def new_attention(cfg: ModelConfig, params: Params, config: MixtureConfig, *, seed: int = 0) -> Adapter | None:
    """The attention LoRA that trains with the router; it changes nothing yet."""
    if not config.rank or config.kind == LORAHUB:
        return None
    return fresh(cfg, params, "attention", rank=config.rank, sites=ATTENTION, seed=seed)


def tree(params: Params, experts: Sequence[Adapter], mixer: Any, attention: Adapter | None) -> dict[str, Any]:
    """What a trainer takes apart: the frozen base, a bank of the experts and what all share, and the router's leaves.

    `params` may be taken apart into layers (`transformer.unstack`), which a step then unrolls.
    """
    bank = Library.holding(experts, params, shared=attention).bank
    return {"params": params, "bank": bank, "router": _leaves(mixer)}


def _leaves(mixer: Any) -> dict[str, Any]:
    """What of a router trains: its parameters; of MoLE the temperature too."""
    trained = {"params": mixer.params}
    return trained | {"temperature": jnp.asarray(mixer.temperature)} if isinstance(mixer, mole.Mole) else trained


def trained_mixer(tree: dict[str, Any], mixer: Any) -> Any:
    """The router with the values of a tree that has been trained."""
    served = {"training": False} if isinstance(mixer, phatgoose.Phatgoose) else {}
    return dataclasses.replace(mixer, **tree["router"], **served)


def groups(attention: Adapter | None, *, rate: float, router_rate: float) -> tuple[Group, ...]:
    """What trains, and how fast: the router, and the attention LoRA; the experts and the base are frozen."""
    found = (Group(name="router", paths=("router.*",), rate=router_rate),)
    if attention is None:
        return found
    shared = ("bank.layers.shared.*.[ab]", "bank.layers.*.shared.*.[ab]")
    return (*found, Group(name="attention", paths=shared, rate=rate))


def loss(cfg: ModelConfig, config: MixtureConfig, mixer: Any) -> Loss:
    """The next-token loss of a tree as `tree` makes it, with the auxiliary losses of `config`.

    For `expert_kl` and `phatgoose` the batches are `owned.Owned`, which know each token's own expert.
    """

    def of(tree: dict[str, Any], batch: Batch, key: Array) -> Sums:
        router = dataclasses.replace(mixer, **tree["router"])
        if config.kind == "gumbel":
            router = dataclasses.replace(router, key=key)
        out = forward(cfg, tree, batch, router)
        sums = next_token_loss(cfg, tree["params"], out.hidden, batch)
        sums = _with_auxiliary(config, sums, out.trace, layout(batch))
        return _with_expert_kl(cfg, config, sums, tree, batch, out.hidden) if config.expert_kl else sums

    return of


def forward(cfg: ModelConfig, tree: dict[str, Any], batch: Batch, router: Any) -> transformer.Output:
    """The decoder's output for a batch, as the router composes the experts of `tree`."""
    places, tokens, params = layout(batch), batch.tokens.reshape(-1), tree["params"]
    route = Route(router=router)
    if isinstance(router, phatgoose.Phatgoose) and router.training:
        route = Route(Route.of(batch.experts.reshape(-1)).choices, router)
    if isinstance(router, xlora.XLoRA):
        route = router.route(transformer.apply(cfg, params, tokens, places).hidden)
    return transformer.apply(cfg, params, tokens, places, bank=tree["bank"], route=route)


def _with_auxiliary(config: MixtureConfig, sums: Sums, trace: dict[str, Choice], places: Dense) -> Sums:
    """Adds each auxiliary loss times the batch's weight, so that the average is loss + Σ factor · auxiliary."""
    if not config.auxiliary:
        return sums
    scores, valid = trace[LAYER].scores, places.valid.reshape(-1)
    values = dict(
        balance=lambda: router_losses.load_balance(scores, valid),
        z=lambda: router_losses.z_loss(scores, valid),
        entropy=lambda: router_losses.entropy(scores, valid),
        consistency=lambda: router_losses.consistency(scores, places),
    )
    extra = {name: values[name]() * sums.weight for name in config.auxiliary}
    added = sum(factor * extra[name] for name, factor in config.auxiliary.items())
    return dataclasses.replace(sums, loss=sums.loss + added, extra=sums.extra | extra)


def _with_expert_kl(cfg: ModelConfig, config: MixtureConfig, sums: Sums, tree, batch: Owned, hidden) -> Sums:
    """Adds factor · Σ_t w_t KL(p_expert || p_mixture), the expert without what is shared."""
    params, tokens, places = tree["params"], batch.tokens.reshape(-1), layout(batch)
    alone = without_shared(tree["bank"])
    own = transformer.apply(cfg, params, tokens, places, bank=alone, route=Route.of(batch.experts.reshape(-1))).hidden
    log_p = lambda h: jax.nn.log_softmax(transformer.logits(cfg, params, h), axis=-1)
    target = jax.lax.stop_gradient(log_p(own))
    kl = jnp.sum(jnp.exp(target) * (target - log_p(hidden)), axis=-1)
    total = jnp.sum(kl * next_tokens(batch)[1])
    return dataclasses.replace(sums, loss=sums.loss + config.expert_kl * total, extra=sums.extra | {"expert_kl": total})
