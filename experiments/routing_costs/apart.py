"""The same requests by models on one device in one program, and by models that run apart."""

import functools
import time
from collections.abc import Sequence

import jax
import numpy as np

from experiments.routing_costs.pair import Sizes, prompts
from experiments.routing_costs.rounds import Rounds
from molora_jax import benchmarking
from molora_jax.engine.blueprint import Blueprint, Model
from molora_jax.engine.front import Front
from molora_jax.engine.processes import Source
from molora_jax.engine.request import EngineConfig
from molora_jax.engine.routed import RoutedEngine
from molora_jax.engine.run import Fleet
from molora_jax.engine.separate import SeparateEngine, in_processes, in_threads
from molora_jax.engine.subserver import Subserver
from molora_jax.routing.program import LARGE
from molora_jax.routing.programs.bernoulli import Bernoulli

PAIR = "experiments.routing_costs.pair"


def apart(
    bench: benchmarking.Bench, sizes: Sequence[Sizes], config: EngineConfig, new: int, share: float, repeats: int
) -> None:
    """Eager, in every placement, and with prompts read ahead: tokens per second, and when the large model first wrote.

    On one CPU the subservers share its cores, and step-synchronous ones too.
    """
    models = [each.model() for each in sizes]
    engines = {
        "fused": RoutedEngine(models, Bernoulli(), config=config),
        "threads": in_threads(models, Bernoulli(), config=config),
        "threads, shadow": in_threads(models, Bernoulli(), config=config, shadow=True),
        "step-synchronous": _rounds(models, config),
        "processes": in_processes([_source(each) for each in sizes], Source(f"{PAIR}:bernoulli"), config),
    }
    for engine in engines.values():
        engine.warm_up()
    asked = prompts(config.max_rows, new, knobs=dict(share=share))
    firsts = {name: [] for name in engines}
    runs = {name: functools.partial(_run, engine, asked, firsts[name]) for name, engine in engines.items()}
    times, tokens = benchmarking.interleave(runs, repeats), new * config.max_rows
    for name, timing in times.items():
        row = dict(placement=name, requests=config.max_rows, share=share, tokens_per_s=tokens / timing.min)
        bench.add(**row, median=tokens / timing.median, first_large_s=min(firsts[name]))
    for engine in engines.values():
        if isinstance(engine, SeparateEngine):
            engine.close()


def _run(engine: Front, asked, firsts: list[float]) -> None:
    """Runs the requests, and notes when the large model's first token was told."""
    begun, first = time.perf_counter(), np.inf
    for request in asked:
        engine.submit(request)
    while engine.busy:
        for event in engine.step():
            if LARGE in event.writers:
                first = min(first, time.perf_counter() - begun)
    firsts.append(first)


def _source(sizes: Sizes) -> Source:
    return Source(f"{PAIR}:read", tuple(map(str, sizes)))


def _rounds(models: Sequence[Model], config: EngineConfig) -> SeparateEngine:
    fleet = Fleet(tuple(model.cfg for model in models), Bernoulli())
    blueprint = Blueprint(fleet, config, tuple(model.dtype for model in models))
    build = lambda i, model: Subserver(i, blueprint, model, {}, jax.devices()[0])
    return SeparateEngine(blueprint, {}, Rounds([functools.partial(build, i, model) for i, model in enumerate(models)]))
