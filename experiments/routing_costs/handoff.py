"""What it costs to hand a request to the other model, by the length of its context."""

import time
from collections.abc import Sequence

import numpy as np

from molora_jax.engine import tuning
from molora_jax.engine.engine import Engine
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.engine.routed import Model, RoutedEngine
from molora_jax.routing.program import LARGE
from molora_jax.routing.programs.bernoulli import Bernoulli

SUFFIX = 16
"""Tokens that the other model wrote meanwhile."""


def handoff(bench, models: Sequence[Model], contexts: Sequence[int], repeats: int) -> float:
    """How many decode steps of its context a hand-off takes: in the last context over the first.

    A hand-off is a run of the large model that catches up on `SUFFIX` tokens. Its message is as long in any context,
    and so is the work of the linear layers; but each of those tokens has to attend to the whole context, as it would
    have if the large model had written it. So the key compares with a decode step there, which pays for one token what
    the hand-off pays for `SUFFIX`. The table has the milliseconds too: `raw_ms` of the run, `ms` beyond a decode step,
    and both slopes. Beside it: finishing the request, and submitting it anew to a server with a prefix cache.
    """
    config = EngineConfig(max_rows=1, max_length=max(contexts) + 64, page_size=64, prefill_chunk=64, block=1)
    engine = RoutedEngine(models, Bernoulli(), config=config)
    server = Engine(models[LARGE].cfg, models[LARGE].params, config)
    server.warm_up()
    rows = []
    for context in contexts:
        large = tuning.step_times(engine.plan, engine.time(context, repeats).seconds)[LARGE]
        step, run, anew = large(1, 1), large(1, SUFFIX), _readmitted(server, context, repeats)
        rows.append(dict(decode_ms=1e3 * step, raw_ms=1e3 * run, ms=1e3 * (run - step), steps=run / step))
        again = dict(readmit_ms=1e3 * (anew - step), readmit_steps=anew / step)
        bench.add(step="hand-off", context=context, **rows[-1], **again)
    slope = lambda name: 1e3 * (rows[-1][name] - rows[0][name]) / (contexts[-1] - contexts[0])
    bench.add(step="hand-off", raw_us_per_token_of_context=slope("raw_ms"), us_per_token_of_context=slope("ms"))
    return rows[-1]["steps"] / rows[0]["steps"]


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
