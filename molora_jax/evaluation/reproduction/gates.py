"""MaLoRA against LoRA of as many parameters and against gates without memory, or with another one, on one seed."""

import time
from pathlib import Path
from typing import Any

from molora_jax.adapters.gate import PUBLISHED
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints import peft
from molora_jax.data.testbed.recipe import Stream, specialist
from molora_jax.evaluation import comparison
from molora_jax.evaluation.reproduction.plan import ENDLESS, MLP, Plan, seed_folder
from molora_jax.evaluation.systems import System
from molora_jax.training.fit import fit
from molora_jax.training.specialist import AdapterConfig, count, named

USES = ("large", "problems", "rate", "gated", "gate_domains", "gates")
RANK = 8


def run(plan: Plan, seed: int, runs: Path) -> dict[str, Any]:
    """Trains an expert of each kind in each domain, for as many updates, and lets them answer its questions."""
    scanned, model = models.load(plan.large, stacked=True), models.load(plan.large)
    found, parameters, seconds = {}, {}, {}
    for domain in plan.gate_domains:
        stream = Stream(specialist(domain), "train", seed, ENDLESS)
        asked = []
        for kind in plan.gates:
            begun = time.perf_counter()
            base = model if kind == "equal" else scanned
            how = dict(steps=plan.gated, rate=plan.rate, seed=seed)
            adapter = fit(base, stream, "expert", settings(kind), **how)
            parameters[kind] = count(adapter)
            seconds[f"{domain} {kind}"] = round(time.perf_counter() - begun, 1)
            peft.save(seed_folder(runs, seed) / f"{kind}-{domain}", model.cfg, adapter)
            asked.append(System(name=kind, experts=(adapter,), single="expert"))
        found[domain] = comparison.compare(model, asked, plan.sets(domain)).values
    return dict(domains=found, parameters=parameters, seconds=seconds)


def settings(kind: str) -> AdapterConfig:
    """Of a kind of `specialist.named`; `equal` is LoRA with the parameters of MaLoRA as published."""
    if kind == "equal":
        return AdapterConfig(kind="equal", rank=RANK, sites=MLP, gate=PUBLISHED["malora"])
    return named(kind, rank=RANK, sites=MLP)
