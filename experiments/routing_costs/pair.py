"""A small and a large model of random weights and one vocabulary, whose step times are as far apart as is asked."""

from typing import NamedTuple

import numpy as np

from molora_jax.config import ModelConfig
from molora_jax.engine.engine import Engine
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.engine.routed import Model
from molora_jax.models import transformer
from molora_jax.routing.programs.bernoulli import Bernoulli

VOCAB, PROMPT = 2048, 128
LONGEST = 12


class Sizes(NamedTuple):
    """What a model of random weights is made from."""

    layers: int
    width: int
    seed: int

    def model(self) -> Model:
        return model(*self)


SMALLER = Sizes(2, 256, 0)


def read(*numbers: str) -> Model:
    """In a process of its own: the model of these sizes."""
    return model(*map(int, numbers))


def bernoulli() -> tuple[Bernoulli, dict]:
    """In a process of its own: the program."""
    return Bernoulli(), {}


def model(layers: int, width: int, seed: int) -> Model:
    """A decoder with its layers unrolled, as a CPU wants them."""
    cfg = ModelConfig(
        family="llama",
        vocab=VOCAB,
        layers=layers,
        width=width,
        mlp_width=3 * width,
        heads=width // 64,
        kv_heads=max(width // 128, 1),
        head_width=64,
        windows=(0,) * layers,
        tied=False,
        attn_scale=0.125,
    )
    return Model(cfg, transformer.unstack(transformer.init(cfg, seed)))


def pair(rows: int, ratio: float) -> tuple[Sizes, Sizes]:
    """A small model, and the shallowest of the large ones whose decode step of `rows` takes `ratio` times as long."""
    base = step_seconds(SMALLER.model(), rows)
    for layers in range(4, LONGEST + 1, 2):
        large = Sizes(layers, 512, 1)
        if step_seconds(large.model(), rows) >= ratio * base:
            break
    return SMALLER, large


def step_seconds(own: Model, rows: int) -> float:
    """Least seconds of a decode step of a model alone."""
    engine = Engine(own.cfg, own.params, EngineConfig(max_rows=rows, max_length=2 * PROMPT, block=16))
    best = np.inf
    for _ in range(3):
        engine.usage.decode_seconds = engine.usage.decode_steps = 0
        engine.run(prompts(rows, 32))
        best = min(best, engine.usage.decode_seconds / engine.usage.decode_steps)
    return best


def prompts(count: int, new: int, *, vocab: int = VOCAB, seed: int = 0, **fields) -> list[Request]:
    """`count` requests of random prompts."""
    rng = np.random.default_rng(seed)
    draw = lambda: tuple(rng.integers(0, vocab, PROMPT).tolist())
    return [Request(prompt=draw(), max_new_tokens=new, seed=i, **fields) for i in range(count)]
