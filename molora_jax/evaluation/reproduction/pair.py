"""The small base beside the large one, routed token by token, on one seed."""

from pathlib import Path
from typing import Any

from molora_jax.checkpoints import model as models
from molora_jax.evaluation import pair
from molora_jax.evaluation.reproduction.plan import Plan

USES = ("large", "small", "pair")


def run(plan: Plan, seed: int, runs: Path) -> dict[str, Any]:
    """Trains and calibrates its routers and measures them at every share; see `evaluation.pair`."""
    small, large = models.load(plan.small), models.load(plan.large)
    return pair.run(small, large, seed=seed, config=plan.pair)
