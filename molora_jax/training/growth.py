"""One expert more for a trained router, without training what it knows of the others."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.composition import Composition
from molora_jax.adapters.router import Router, over_experts
from molora_jax.adapters.selection import Placement
from molora_jax.checkpoints import composition
from molora_jax.checkpoints.model import Model
from molora_jax.config import UserError
from molora_jax.data.example import Example
from molora_jax.training import compose, mixture
from molora_jax.training.compose import ComposeConfig
from molora_jax.training.optimiser import Group
from molora_jax.training.step import Trainer
from molora_jax.typing import Params


def grown(
    model: Model,
    found: Composition,
    expert: Adapter,
    traces: Sequence[Example],
    owner: dict[str, str],
    config: ComposeConfig,
    folder: Path | None = None,
    *,
    progress: bool = True,
) -> Composition:
    """The composition with an expert more, behind the others: only its own scores train.

    Everything else is frozen to the bit: base, experts, attention LoRA, and what the router asks of the other experts.
    The new scores start as the mean of theirs.

    Args:
      traces: of all experts; the new one's alone would teach the router to choose it always.
      config: of the run; its kind is the composition's.
      folder: as that of `compose.run`.

    Raises:
      UserError: a router that is more than a scorer of each expert, or what `compose.run` raises.
    """
    if type(found.mixer) is not Router:
        raise UserError(f"growth: got a {type(found.mixer).__name__}, expected a Router, one that scores experts alone")
    experts = (*found.experts, expert)
    count = len(experts)
    mixer = dataclasses.replace(found.mixer, placement=Placement(jnp.arange(count, dtype=jnp.int32), count))
    documents = compose.split(model, traces, config)
    made = _trainer(model, found, experts, mixer, config)
    tree = compose.fit(made, documents, compose.slots(experts, traces, owner), config, folder, progress=progress)
    params = jax.tree.map(np.asarray, _whole(tree["router"]))
    result = Composition(experts, dataclasses.replace(mixer, params=params), found.attention)
    if folder is not None:
        composition.save(folder, model, result)
    return result


def _trainer(model: Model, found: Composition, experts, mixer: Router, config: ComposeConfig) -> Trainer:
    mean = over_experts(lambda leaf, axis: jnp.mean(leaf, axis=axis, keepdims=True), found.mixer.params)
    tree = mixture.tree(compose.unrolled(model), experts, mixer, found.attention)
    tree["router"] = {"new": jax.tree.map(jnp.array, mean), "old": found.mixer.params}
    whole = mixture.loss(model.cfg, config.mixture, mixer)
    loss = lambda tree, batch, key: whole(tree | {"router": {"params": _whole(tree["router"])}}, batch, key)
    rows = Group(name="router", paths=("router.new.*.out.*", "router.new.out.*"), rate=config.router_rate)
    return compose.stepper(tree, loss, (rows,), config)


def _whole(router: dict[str, Any]) -> Params:
    """Old and new scores side by side; a hidden layer is the old one's."""
    return over_experts(lambda old, new, axis: jnp.concatenate([old, new], axis), router["old"], router["new"])
