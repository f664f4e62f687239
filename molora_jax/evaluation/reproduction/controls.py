"""The control of stage 1: each expert again from its start, rewards shuffled within the batch: nothing to learn."""

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
    folder, model = seed_folder(runs, seed), models.load(plan.large)
    found = {}
    for name in SINGLE:
        start, control = folder / name / "start", folder / "controls" / name
        how = dict(shuffled_rewards=True, start=str(start / "adapter"))
        grpo.run(settings(plan, seed, name, **how), control, progress=False)
        asked = [alone(model, start, SUPERVISED), alone(model, control, SHUFFLED)]
        found[name] = comparison.compare(model, asked, plan.sets(name)).values
    return dict(domains=found)
