"""What reinforcement trains and the engine plays: one adapter, or the router and the attention LoRA over experts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.composition import Composition
from molora_jax.adapters.library import Library
from molora_jax.adapters.route import Route
from molora_jax.adapters.router import Router
from molora_jax.adapters.shared import with_shared, without_shared
from molora_jax.adapters.spec import BankSpec
from molora_jax.checkpoints.model import Model
from molora_jax.config import UserError
from molora_jax.engine.experts import Experts
from molora_jax.models import transformer
from molora_jax.training import compose, experience, mixture, specialist
from molora_jax.training.batch import layout
from molora_jax.training.experience import Experience
from molora_jax.training.optimiser import Group
from molora_jax.training.policy_loss import Decode
from molora_jax.training.rollout import Rollout, chosen
from molora_jax.typing import Float, Int

REPLAYED = ("hard", "hard_dense")
"""Modes whose choice a trace has whole: one expert at unit scale."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """One that learns.

    Attributes:
      tree: of a trainer, the base's parameters as "params" in it.
      decode: of such a tree, with the experts that a batch has recorded, where it has.
      groups: what trains, and how fast.
      experts: what an engine plays it with.
      adapter: that its requests name; None where a router decides, and what it chose is recorded.
      trained: what a tree has learnt: an adapter, or a composition.
      play: lets `experts` have such a one from now on; nothing is compiled.
    """

    tree: dict[str, Any]
    decode: Decode
    groups: tuple[Group, ...]
    experts: Experts
    adapter: str | None
    trained: Callable[[dict[str, Any]], Any]
    play: Callable[[Any], None]

    @property
    def routed(self) -> bool:
        """Whether a router decides."""
        return self.adapter is None

    def choices(self, rollouts: Sequence[Rollout]) -> list[Int[np.ndarray, "T K"]] | None:
        """The experts of the tokens of each rollout, as `experience` takes them."""
        return [chosen(rollout, self.experts.library.resident) for rollout in rollouts] if self.routed else None


def of_adapter(model: Model, adapter: Adapter, *, rate: float, remat: bool = False) -> Policy:
    """One adapter over the frozen base; on a CPU the layers are unrolled."""
    unroll = jax.default_backend() == "cpu" and not adapter.gates
    tree = specialist.tree(dict(model.params), adapter, unroll=unroll)
    params = tree["params"]
    library = Library(BankSpec.holding([adapter], dtype=params["embed"]["weight"].dtype), params)
    return Policy(
        tree=tree,
        decode=specialist.decoder(model.cfg, remat=remat),
        groups=specialist.groups(adapter, rate=rate, gate_rate=rate),
        experts=Experts(library, model.cfg.vocab),
        adapter=adapter.name,
        trained=lambda tree: specialist.trained(tree, adapter),
        play=lambda found: library.add(dataclasses.replace(found, name=adapter.name)),
    )


def of_composition(model: Model, found: Composition, *, rate: float, router_rate: float, remat: bool = False) -> Policy:
    """The router and the attention LoRA of a composition, over frozen experts (Molavi et al. 2026, stage 3).

    The rollouts' choices are replayed in the update: what acted is what learns, and the router learns from them as in
    stage 2, straight through.

    Raises:
      UserError: a router that does more than choose one expert a layer at unit scale, which no trace tells whole.
    """
    mixer = found.mixer
    if type(mixer) is not Router or mixer.rule.mode not in REPLAYED or mixer.per_site or mixer.key is not None:
        what = mixer.rule.mode if type(mixer) is Router else type(mixer).__name__
        raise UserError(f"composition: got {what}, expected a router of one expert a layer: {', '.join(REPLAYED)}")
    tree = mixture.tree(compose.unrolled(model), found.experts, mixer, found.attention)
    params = tree["params"]
    library = Library.holding(found.experts, params, shared=found.attention)
    experts = Experts(library, model.cfg.vocab, router=mixer)

    def decode(tree: dict[str, Any], batch: Experience) -> Float[jax.Array, "N D"]:
        given = {} if batch.choices is None else experience.replayed(batch).choices
        route = Route(given, dataclasses.replace(mixer, **tree["router"]))
        tokens = batch.tokens.reshape(-1)
        how = dict(bank=tree["bank"], route=route, remat=remat)
        return transformer.apply(model.cfg, tree["params"], tokens, layout(batch), **how).hidden

    def play(now: Composition) -> None:
        if now.attention is not None:
            library.bank = with_shared(without_shared(library.bank), params, now.attention)
        experts.router = jax.tree.map(jnp.asarray, now.mixer)

    return Policy(
        tree=tree,
        decode=decode,
        groups=mixture.groups(found.attention, rate=rate, router_rate=router_rate),
        experts=experts,
        adapter=None,
        trained=lambda tree: Composition(found.experts, *compose.trained(tree, mixer, found.attention)),
        play=play,
    )
