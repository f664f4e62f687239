"""The control of stage 1: each expert again, with rewards shuffled within the batch: there is nothing to learn."""

from pathlib import Path
from typing import Any

from molora_jax.checkpoints import model as models
from molora_jax.evaluation import comparison
from molora_jax.evaluation.reproduction.experts import SUPERVISED, USES, alone, settings
from molora_jax.evaluation.reproduction.plan import SINGLE, Plan, seed_folder
from molora_jax.training import grpo

__all__ = ["SHUFFLED", "USES", "run"]

SHUFFLED = "shuffled rewards"


def run(plan: Plan, seed: int, runs: Path) -> dict[str, Any]:
    """Trains the controls and lets each, before and after the rewards, answer its own domain's questions."""
    folder, model = seed_folder(runs, seed) / "controls", models.load(plan.large)
    found = {}
    for name in SINGLE:
        grpo.run(settings(plan, seed, name, shuffled=True), folder / name, progress=False)
        asked = [alone(model, folder / name / "start", SUPERVISED), alone(model, folder / name, SHUFFLED)]
        found[name] = comparison.compare(model, asked, plan.sets(name)).values
    return dict(domains=found)
