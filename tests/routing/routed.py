"""Tiny decoders of the catalogue's vocabulary and width, for engines that route and for the naive loop beside them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.config import ModelConfig
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.engine.routed import Model, RoutedEngine
from molora_jax.models import transformer
from molora_jax.nn.layout import dense
from molora_jax.routing.program import Program
from tests.routing import catalogue, naive_route
from tests.routing.catalogue import VOCAB, WIDTH

LENGTH = 32
"""Longest prompt and continuation together."""


def config(layers: int, width: int = WIDTH) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab=VOCAB,
        layers=layers,
        width=width,
        mlp_width=8,
        heads=2,
        kv_heads=1,
        head_width=4,
        windows=(0,) * layers,
        tied=False,
        attn_scale=0.5,
    )


@functools.cache
def model(seed: int, width: int = WIDTH) -> Model:
    """Decoder `seed`: near decoder 0 in its ends, so that they often agree, and sharper than random weights are."""
    cfg = config(1 + seed % 2, width)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), transformer.init(cfg, seed))
    first = transformer.init(config(1, width), 0)
    for end in ("embed", "head"):
        near = np.asarray(first[end]["weight"], np.float64)
        params[end]["weight"] = (9 if end == "head" else 2) * (near + 0.3 * params[end]["weight"])
    return Model(cfg, jax.tree.map(jnp.asarray, params))


@functools.partial(jax.jit, static_argnums=0)
def _run(cfg, params, tokens, length):
    layout = dense(1, LENGTH + 8, valid=(jnp.arange(LENGTH + 8) < length)[None])
    hidden = transformer.apply(cfg, params, tokens, layout).hidden
    return transformer.logits(cfg, params, hidden), hidden


@functools.cache
def reader(seed: int, width: int = WIDTH) -> naive_route.Model:
    """Decoder `seed` without a cache."""
    own = model(seed, width)

    @functools.cache
    def read(tokens):
        padded = np.zeros(LENGTH + 8, np.int32)
        padded[: len(tokens)] = tokens
        logits, hidden = _run(own.cfg, own.params, padded, np.int32(len(tokens)))
        return np.asarray(logits)[: len(tokens)], np.asarray(hidden)[: len(tokens)]

    return lambda tokens, adapters: read(tuple(tokens))


def engine(program: Program, **sizes) -> RoutedEngine:
    defaults = dict(max_rows=4, max_length=LENGTH, page_size=4, prefill_chunk=16, block=8)
    models = [model(i) for i in range(program.models)]
    return RoutedEngine(models, program, catalogue.params(program), EngineConfig(**defaults | sizes), entropy=True)


def requests(seed: int, count: int, program: Program | None = None) -> list[Request]:
    """Greedy and sampled ones, with and without stops, of any length; with knobs that suit `program`."""
    rng = np.random.default_rng(seed)
    knobs, drawn = catalogue.KNOBS.get(program and catalogue.name(program), {}), []
    for i in range(count):
        length = int(rng.integers(1, 12))
        drawn.append(
            Request(
                prompt=tuple(rng.integers(0, VOCAB, length).tolist()),
                max_new_tokens=(LENGTH - length, 9, 1)[i % 3],
                stops=tuple(rng.integers(0, VOCAB, i // 2 % 2).tolist()),
                temperature=0.0 if i % 2 else 1.0,
                seed=int(rng.integers(2**32)),
                knobs=knobs,
            )
        )
    return drawn


def naive(program: Program, request: Request) -> naive_route.Answer:
    """What the slow and obvious loop gives."""
    return naive_route.generate(
        program,
        [reader(i) for i in range(program.models)],
        request.prompt,
        params=catalogue.params(program),
        knobs=request.knobs,
        limit=len(request.prompt) + request.max_new_tokens,
        stops=request.stops,
        sampler=naive_route.Sampler(request.temperature, request.seed),
    )
