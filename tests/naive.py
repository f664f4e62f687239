"""The slow and obvious way to generate: no cache, no batch, and transformers' order of cuts in fp64 numpy."""

import functools

import jax
import numpy as np

from molora_jax.config import ModelConfig
from molora_jax.engine import sampling
from molora_jax.engine.request import Request
from molora_jax.models import transformer
from molora_jax.nn.layout import dense
from molora_jax.typing import Params

LENGTH = 64
"""Longest prompt and continuation together."""


def probabilities(scores, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, **_) -> np.ndarray:
    """What a token is sampled from: [V]; cut by temperature, top-k, top-p and min-p, sorting each time."""
    scores = np.asarray(scores, np.float64) / np.float64(np.float32(temperature))
    if top_k:
        scores = np.where(scores < np.sort(scores)[-min(top_k, len(scores))], -np.inf, scores)
    if top_p < 1:
        order = np.argsort(scores)
        dropped = order[:-1][np.cumsum(_softmax(scores)[order])[:-1] <= 1 - np.float64(np.float32(top_p))]
        scores[dropped] = -np.inf
    mass = _softmax(scores)
    if min_p:
        scores = np.where(mass < np.float64(np.float32(min_p)) * mass.max(), -np.inf, scores)
    return _softmax(scores)


def _softmax(scores: np.ndarray) -> np.ndarray:
    mass = np.exp(scores - scores.max())
    return mass / mass.sum()


@functools.partial(jax.jit, static_argnums=0)
def _next_scores(cfg: ModelConfig, params: Params, tokens, length):
    layout = dense(1, LENGTH, valid=(np.arange(LENGTH) < length)[None])
    hidden = transformer.apply(cfg, params, tokens, layout).hidden
    return transformer.logits(cfg, params, hidden[length - 1][None])[0]


@functools.partial(jax.jit, static_argnames=("model", "purpose"))
def _uniform(seed, position, model, purpose):
    return sampling.draw(seed[None], position[None], model=model, purpose=purpose)[0]


def generate(cfg: ModelConfig, params: Params, request: Request) -> tuple[list[int], list[float], str]:
    """The tokens of a request, their log-probabilities, and how it ended."""
    tokens, logprobs = list(request.prompt), []
    while True:
        padded = np.zeros(LENGTH, np.int32)
        padded[: len(tokens)] = tokens
        scores = np.asarray(_next_scores(cfg, params, padded, np.int32(len(tokens))), np.float64)
        token = int(np.argmax(scores))
        if request.temperature:
            cuts = {name: getattr(request, name) for name in ("temperature", "top_k", "top_p", "min_p")}
            sums = np.cumsum(probabilities(scores, **cuts))
            uniform = _uniform(np.uint32(request.seed), np.int32(len(tokens)), model=0, purpose=sampling.SAMPLE)
            token = int(np.searchsorted(sums, float(uniform) * sums[-1], side="right"))
        tokens.append(token)
        logprobs.append(float(np.log(_softmax(scores)[token])))
        given = tokens[len(request.prompt) :]
        if token in request.stops or len(given) == request.max_new_tokens:
            return given, logprobs, "stop" if token in request.stops else "length"
