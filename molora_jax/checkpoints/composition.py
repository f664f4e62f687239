"""A composition in a folder: `router`, which names its experts, and `attention`, a PEFT folder."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.composition import Composition
from molora_jax.checkpoints import peft, router
from molora_jax.checkpoints.model import Model

ROUTER, ATTENTION = "router", "attention"


def save(folder: Path | str, model: Model, found: Composition) -> None:
    """Writes the router, last, and the adapter that all tokens have; the experts have folders of their own."""
    folder = Path(folder)
    for part in (ROUTER, ATTENTION):
        shutil.rmtree(folder / part, ignore_errors=True)
    if found.attention is not None:
        peft.save(folder / ATTENTION, model.cfg, found.attention)
    router.save(folder / ROUTER, found.mixer, found.experts, model.params)


def load(folder: Path | str, model: Model, experts: Sequence[Adapter]) -> Composition:
    """Reads what `save` wrote, or the folder of a router alone.

    Args:
      experts: in the router's order.

    Raises:
      UserError: other experts or another base than it was trained with, or no such files.
    """
    folder = Path(folder)
    own = folder / ROUTER if (folder / ROUTER).is_dir() else folder
    mixer = router.load(own, experts, model.params)
    attention = None
    if (folder / ATTENTION).is_dir():
        attention, _ = peft.load(folder / ATTENTION, model.cfg, name=ATTENTION)
    return Composition(tuple(experts), mixer, attention)
