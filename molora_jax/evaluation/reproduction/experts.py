"""Stage 1 of a seed: an expert for each domain, a short supervised start and then rewards."""

from pathlib import Path
from typing import Any

from molora_jax.adapters.adapter import Adapter
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints import peft
from molora_jax.checkpoints.model import Model
from molora_jax.evaluation import comparison
from molora_jax.evaluation.reproduction.plan import MLP, SINGLE, Plan, seed_folder
from molora_jax.evaluation.systems import BASE, System
from molora_jax.training import grpo
from molora_jax.training.rlvr_settings import RLVRConfig, testbed
from molora_jax.training.specialist import AdapterConfig

USES = ("large", "problems", "supervised", "reinforced", "rank", "rate")
SUPERVISED, REWARDED = "supervised", "rewarded"


def run(plan: Plan, seed: int, runs: Path) -> dict[str, Any]:
    """Trains the experts and lets each of them, before and after the rewards, answer its own domain's questions."""
    folder, seconds = seed_folder(runs, seed), {}
    for name in SINGLE:
        seconds[name] = grpo.run(settings(plan, seed, name), folder / name, progress=False).seconds
    model = models.load(plan.large)
    found = {}
    for name in SINGLE:
        asked = [BASE, alone(model, folder / name / "start", SUPERVISED), alone(model, folder / name, REWARDED)]
        found[name] = comparison.compare(model, asked, plan.sets(name)).values
    return dict(domains=found, seconds=seconds)


def settings(plan: Plan, seed: int, domain: str, **how) -> RLVRConfig:
    """Of the run of one expert; `how` are other fields."""
    return testbed(
        domain,
        model=plan.large,
        adapter=AdapterConfig(rank=plan.rank, sites=MLP),
        sft_steps=plan.supervised,
        sft_rate=plan.rate,
        steps=plan.reinforced,
        problems=32,
        seed=seed,
        **how,
    )


def alone(model: Model, folder: Path, name: str) -> System:
    """The base with the adapter that a run exported, for every token."""
    adapter = read(model, folder, "expert")
    return System(name=name, experts=(adapter,), single="expert")


def read(model: Model, folder: Path, name: str) -> Adapter:
    """The adapter that a run exported."""
    return peft.load(folder / "adapter", model.cfg, name=name)[0]
