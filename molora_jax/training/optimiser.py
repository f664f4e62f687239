"""AdamW over groups of leaves, each with its own learning rate: configuration, and the optax transformation."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp

from molora_jax.config import UserError
from molora_jax.training.partition import Leaves, matches


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Leaves that train at one rate. A leaf that no group names is frozen; the first of several counts.

    Attributes:
      name: "adapters", "router", …
      paths: shell patterns over leaf paths, as "bank.*.[ab]", "router.params.*", "params.*" (everything).
      rate: peak learning rate.
      decay: weight decay, decoupled (Loshchilov & Hutter 2019, AdamW).
    """

    name: str
    paths: tuple[str, ...]
    rate: float
    decay: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The factor on every group's rate, by step: 0 to 1 over the warm-up, 1 for a while, then to `end` at `steps`.

    Attributes:
      shape: how it falls in the end.
      steps: of the whole run.
      warmup: steps of linear rise; the first of them already moves.
      hold: steps at 1 after them (Hu et al. 2024, MiniCPM §4): up to the fall, a longer run is the same run.
      end: factor at the last step.
    """

    shape: Literal["constant", "linear", "cosine"] = "constant"
    steps: int = 0
    warmup: int = 0
    hold: int = 0
    end: float = 0.0

    def __post_init__(self):
        if self.shape not in ("constant", "linear", "cosine"):
            raise UserError(f"schedule: got shape {self.shape!r}, expected constant, linear or cosine")
        before = self.warmup + self.hold
        if min(self.warmup, self.hold) < 0 or (self.shape != "constant" and self.steps <= before):
            raise UserError(f"schedule: got {before} steps of {self.steps} before the fall, expected fewer than all")

    def __call__(self, step):
        """The factor of the update that follows `step` updates."""
        rise = jnp.minimum((step + 1) / (self.warmup + 1), 1.0)
        if self.shape == "constant":
            return rise
        before = self.warmup + self.hold
        done = jnp.clip((step - before) / (self.steps - before), 0.0, 1.0)
        left = (1 + jnp.cos(jnp.pi * done)) / 2 if self.shape == "cosine" else 1 - done
        return rise * (self.end + (1 - self.end) * left)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimiserConfig:
    """All that fixes the updates.

    Attributes:
      groups: what trains, and how fast.
      schedule: of all rates.
      clip: largest global norm of the gradient over all groups; None for no limit.
      b1, b2, eps: Adam's (Kingma & Ba 2015, alg. 1).
    """

    groups: tuple[Group, ...]
    schedule: Schedule = Schedule()
    clip: float | None = 1.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self):
        names = [group.name for group in self.groups]
        if not names or len(set(names)) < len(names):
            raise UserError(f"optimiser: got groups {names}, expected at least one, each with its own name")

    def trains(self, path: str) -> bool:
        """Whether some group names this leaf."""
        return self.group_of(path) is not None

    def group_of(self, path: str) -> str | None:
        """The group that a leaf belongs to."""
        return next((group.name for group in self.groups if matches(group.paths)(path)), None)


def optimiser(config: OptimiserConfig, trained: Leaves):
    """Clipping, Adam, then each group's decay and rate, as an `optax.GradientTransformation` over `trained`.

    Raises:
      UserError: optax is missing, or a group names nothing that trains.
    """
    optax = _optax()
    labels = {path: config.group_of(path) for path in trained}
    for group in config.groups:
        if group.name not in labels.values():
            raise UserError(f"optimiser: group {group.name!r} matches no leaf with {group.paths}; change its paths")
    each = {
        group.name: optax.chain(
            *([optax.add_decayed_weights(group.decay)] if group.decay else []),
            optax.scale_by_learning_rate(_rate(config.schedule, group.rate)),
        )
        for group in config.groups
    }
    return optax.chain(
        *([] if config.clip is None else [optax.clip_by_global_norm(config.clip)]),
        optax.scale_by_adam(config.b1, config.b2, config.eps),
        optax.multi_transform(each, labels),
    )


def _rate(schedule: Schedule, peak: float) -> Callable:
    return lambda step: peak * schedule(step)


def _optax():
    try:
        import optax  # only here: what runs a trained model does not need it
    except ImportError:
        raise UserError("training: the package optax is missing; pip install 'molora_jax[train]'") from None
    return optax
