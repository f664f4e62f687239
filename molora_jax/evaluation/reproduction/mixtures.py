"""Stage 2 of a seed: every way to compose the frozen experts, trained on their traces and put beside the bounds."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.composition import Composition, without
from molora_jax.adapters.library import Library
from molora_jax.adapters.mixtures.arrow import arrow
from molora_jax.checkpoints import composition, peft
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.model import Model
from molora_jax.data.example import Example
from molora_jax.data.questions import questions
from molora_jax.engine.engine import Engine
from molora_jax.engine.experts import Experts
from molora_jax.engine.request import EngineConfig
from molora_jax.evaluation import comparison, report, systems
from molora_jax.evaluation.reproduction import experts as stage1
from molora_jax.evaluation.reproduction.plan import ADDED, LATE, REMOVED, SINGLE, Plan, seed_folder
from molora_jax.evaluation.routing import routing
from molora_jax.evaluation.systems import LENGTH, System
from molora_jax.training import classifier, compose, distil, growth
from molora_jax.training.compose import ComposeConfig
from molora_jax.training.distil import DistilConfig
from molora_jax.training.fit import fit
from molora_jax.training.mixture import ATTENTION, MixtureConfig
from molora_jax.training.specialist import AdapterConfig

USES = (*stage1.USES, "traces", "composed", "kinds", "joint")
OWNER = {name: name for name in SINGLE}
ROUTER_ALONE = "hard_dense, no attention LoRA"


def run(plan: Plan, seed: int, runs: Path) -> dict[str, Any]:
    """Distils, trains every mixture, and compares them on prompts of one domain and of several."""
    folder = seed_folder(runs, seed)
    model = models.load(plan.large)
    experts = [stage1.read(model, folder / name, name) for name in SINGLE]
    traces, tallies = drawn(plan, model, experts, seed)
    distil.save(folder / "traces.jsonl", traces)
    composed, seconds = {}, {}
    for kind in plan.kinds:
        begun = time.perf_counter()
        composed[kind] = compose.run(model, experts, traces, OWNER, settings(plan, kind, seed), progress=False)
        seconds[kind] = round(time.perf_counter() - begun, 1)
    best = composed.get("hard_dense", composed["hard"])
    composition.save(folder / "hard", model, best)
    asked = [*systems.bounds(experts, OWNER, model.cfg.layers), *_rivals(plan, model, experts, traces, seed, folder)]
    asked += [systems.composed(name, found) for name, found in composed.items()]
    asked.append(systems.composed(REMOVED, without(best, LATE)))
    asked.append(systems.composed(ADDED, _added(plan, model, experts, traces, seed)))
    found = comparison.compare(model, asked, plan.sets())
    known = [example for name in SINGLE for example in questions(f"testbed:{name}", "validation", 16)]
    return dict(
        comparison=found.values,
        parameters={name: compose.parameters(c) for name, c in composed.items()},
        routing={name: report.as_values(routing(model, c, known)) for name, c in composed.items()},
        traces={task: str(tally) for task, tally in tallies.items()},
        seconds=seconds,
    )


def settings(plan: Plan, kind: str, seed: int) -> ComposeConfig:
    """Of one mixture's run."""
    steps = plan.composed
    how = dict(steps=steps, evaluate_every=steps, log_every=steps, held_out=4, warmup=min(10, steps - 1))
    return ComposeConfig(mixture=MixtureConfig(kind=kind), seed=seed, **how)


def drawn(plan: Plan, model: Model, experts: Sequence[Adapter], seed: int):
    """(traces, tallies) of the experts on training questions."""
    asked = [e for name in SINGLE for e in questions(f"testbed:{name}", "train", plan.traces, seed=1000 + seed)]
    library = Library.holding(experts, model.params)
    config = EngineConfig(max_rows=64, max_length=LENGTH, block=LENGTH)
    engine = Engine(model.cfg, model.params, config, Experts(library, model.cfg.vocab))
    return distil.traces(engine, model.tokenizer, asked, OWNER, DistilConfig(max_new_tokens=LENGTH - 1))


def _added(plan: Plan, model: Model, experts: Sequence[Adapter], traces: Sequence[Example], seed: int) -> Composition:
    """A router of all experts but one, to which that one is added with no scores trained but its own."""
    config = settings(plan, "hard_dense" if "hard_dense" in plan.kinds else "hard", seed)
    others = [trace for trace in traces if OWNER[trace.task] != LATE]
    (late,) = (expert for expert in experts if expert.name == LATE)
    first = compose.run(model, [e for e in experts if e is not late], others, OWNER, config, progress=False)
    return growth.grown(model, first, late, traces, OWNER, config, progress=False)


def _rivals(plan: Plan, model: Model, experts: Sequence[Adapter], traces: Sequence[Example], seed: int, folder: Path):
    """What is no mixture of `training.mixture`: Arrow, the prompt classifier, one LoRA for everything, and what of a
    mixture is its attention LoRA's: the LoRA without experts, and the router without the LoRA.
    """
    decides = classifier.train(model, traces, OWNER, [e.name for e in experts], seed=seed)
    one = fit(model, traces, "joint", AdapterConfig(rank=plan.rank), steps=plan.joint, rate=plan.rate, seed=seed)
    peft.save(folder / "joint", model.cfg, one)
    config = settings(plan, "hard_dense", seed)
    alone = AdapterConfig(rank=config.mixture.rank, sites=ATTENTION)
    attention = fit(model, traces, "attention", alone, steps=config.steps, rate=config.rate, seed=seed)
    routed = dataclasses.replace(config, mixture=dataclasses.replace(config.mixture, rank=0))
    return [
        systems.composed("arrow", Composition(tuple(experts), arrow(experts, k=1))),
        System(name="prompt classifier", experts=tuple(experts), classifier=decides),
        System(name="joint LoRA", experts=(one,), single=one.name),
        System(name="attention LoRA alone", experts=(attention,), single=attention.name),
        systems.composed(ROUTER_ALONE, compose.run(model, experts, traces, OWNER, routed, progress=False)),
    ]
