"""What routed inference is compared with: one model alone, a loop without a cache, and a server for each model."""

import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from molora_jax.engine.engine import Engine
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.engine.routed import Model
from molora_jax.models import transformer
from molora_jax.nn.layout import dense


def alone(own: Model, rows: int, length: int) -> Callable[[Sequence[Request]], float]:
    """Decodes requests on one model; returns tokens per second."""
    engine = Engine(own.cfg, own.params, EngineConfig(max_rows=rows, max_length=length, block=32))
    engine.warm_up()

    def run(requests: Sequence[Request]) -> float:
        begun = time.perf_counter()
        events = engine.run(requests)
        return sum(len(event.tokens) for event in events) / (time.perf_counter() - begun)

    return run


def naive(models: Sequence[Model], share: float, contexts: Sequence[int]) -> float:
    """Tokens per second of the loop that the released script of R2R runs, one request and no cache between models.

    Every token costs a pass of the small model over its whole context, and `share` of a pass of the large one: the mean
    over some lengths of context, each the least of five.
    """
    seconds = [_pass(models[0], length) + share * _pass(models[1], length) for length in contexts]
    return 1 / float(np.mean(seconds))


def _pass(own: Model, length: int) -> float:
    def last(params, tokens):
        hidden = transformer.apply(own.cfg, params, tokens, dense(1, length)).hidden
        return transformer.logits(own.cfg, params, hidden[-1:])

    tokens, times = np.zeros(length, np.int32), []
    run = jax.jit(last).lower(own.params, tokens).compile()
    for _ in range(6):
        begun = time.perf_counter()
        jax.block_until_ready(run(own.params, tokens))
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def dispatched(models: Sequence[Model], rows: int, length: int, seed: int = 0):
    """A server with a prefix cache for each model, and a dispatcher that asks for one token a call."""
    servers = [Engine(own.cfg, own.params, EngineConfig(max_rows=rows, max_length=length, block=1)) for own in models]
    for server in servers:
        server.warm_up()

    def run(requests: Sequence[Request], share: float, new: int) -> float:
        texts, rng = [list(request.prompt) for request in requests], np.random.default_rng(seed)
        begun = time.perf_counter()
        for _ in range(new):
            routed = rng.random(len(texts)) < share
            tokens = _call(servers[0], texts)
            redone = _call(servers[1], [text for text, yes in zip(texts, routed, strict=True) if yes])
            for text, token, yes in zip(texts, tokens, routed, strict=True):
                text.append(redone.pop(0) if yes else token)
        return new * len(texts) / (time.perf_counter() - begun)

    return run


def _call(server: Engine, texts: list[list[int]]) -> list[int]:
    asked = [Request(prompt=tuple(text), max_new_tokens=1) for text in texts]
    return [event.tokens[0] for event in server.run(asked)] if asked else []
