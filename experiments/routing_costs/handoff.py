"""What it costs to hand a request to the other model, by the length of its context."""

import time
from collections.abc import Sequence

import numpy as np

from molora_jax.engine.engine import Engine
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.engine.routed import Model, RoutedEngine
from molora_jax.routing.program import LARGE
from molora_jax.routing.programs.bernoulli import Bernoulli

SUFFIX = 16
"""Tokens that the other model wrote meanwhile."""


def handoff(bench, models: Sequence[Model], contexts: Sequence[int], repeats: int) -> float:
    """Seconds of a hand-off in the last context over those in the first.

    A hand-off is a run of the large model that catches up on `SUFFIX` tokens, less a run in the same context that reads
    one. Beside it: finishing the request, and submitting it anew to a server with a prefix cache.
    """
    config = EngineConfig(max_rows=1, max_length=max(contexts) + 64, page_size=64, prefill_chunk=64, block=1)
    engine = RoutedEngine(models, Bernoulli(), config=config)
    server = Engine(models[LARGE].cfg, models[LARGE].params, config)
    server.warm_up()
    costs = []
    for context in contexts:
        seconds = zip(engine.plan.choices, engine.time(context, repeats), strict=True)
        of = {bucket.tokens: float(value) for (run, bucket), value in seconds if run.model == LARGE}
        costs.append(of[SUFFIX] - of[1])
        anew = _readmitted(server, context, repeats) - of[1]
        bench.add(step="hand-off", context=context, ms=1e3 * costs[-1], readmit_ms=1e3 * anew)
    slope = (costs[-1] - costs[0]) / (contexts[-1] - contexts[0])
    bench.add(step="hand-off", us_per_token_of_context=1e6 * slope)
    return costs[-1] / costs[0]


def _readmitted(server: Engine, context: int, repeats: int) -> float:
    """Least seconds from a submission to its first token, when all but the last `SUFFIX` tokens are known."""
    rng, took = np.random.default_rng(0), []
    for _ in range(repeats):
        text = rng.integers(0, server.cfg.vocab, context).tolist()
        server.run([Request(prompt=tuple(text), max_new_tokens=1)])
        text += rng.integers(0, server.cfg.vocab, SUFFIX).tolist()
        begun = time.perf_counter()
        server.run([Request(prompt=tuple(text), max_new_tokens=1)])
        took.append(time.perf_counter() - begun)
    return min(took)
