"""The small base beside the large one, routed token by token, on one seed."""

from pathlib import Path
from typing import Any

from molora_jax.checkpoints import model as models
from molora_jax.evaluation import pair
from molora_jax.evaluation.reproduction.plan import QUICK, Plan

USES = ("large", "small")


def run(plan: Plan, seed: int, runs: Path) -> dict[str, Any]:
    """Trains and calibrates its routers and measures them at every share; see `evaluation.pair`."""
    small, large = models.load(plan.small), models.load(plan.large)
    few = dict(shares=(0.2,), train=100, validation=20, test=20, repeats=1)
    config = pair.PairConfig(**few) if plan == QUICK else pair.PairConfig()
    return pair.run(small, large, seed=seed, config=config)
