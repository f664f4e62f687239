"""The small base beside the large one, routed token by token, on one seed."""

from pathlib import Path
from typing import Any

from molora_jax.checkpoints import model as models
from molora_jax.evaluation import pair
from molora_jax.evaluation.reproduction.plan import Plan, seed_folder

USES = ("large", "small", "pair")
HEAD = "r2r"
"""The folder of the trained head."""


def run(plan: Plan, seed: int, runs: Path) -> dict[str, Any]:
    """Trains and calibrates its routers and measures them at every share (`evaluation.pair`), and keeps R2R's head."""
    small, large = models.load(plan.small), models.load(plan.large)
    return pair.run(small, large, seed=seed, config=plan.pair, folder=seed_folder(runs, seed) / HEAD)
