"""Tiny models to route between: decoders with random weights, and tables that know only the last tokens."""

import functools
from collections.abc import Callable

import jax
import numpy as np

from molora_jax.config import ModelConfig
from molora_jax.models import transformer
from molora_jax.nn.layout import dense

VOCAB, WIDTH, LENGTH = 23, 16, 48
CONFIG = ModelConfig(
    family="llama",
    vocab=VOCAB,
    layers=1,
    width=WIDTH,
    mlp_width=24,
    heads=2,
    kv_heads=1,
    head_width=8,
    windows=(0,),
    tied=False,
    attn_scale=8**-0.5,
)


@jax.jit
def _run(params, tokens, length):
    layout = dense(1, LENGTH, valid=(np.arange(LENGTH) < length)[None])
    hidden = transformer.apply(CONFIG, params, tokens, layout).hidden
    return 3 * transformer.logits(CONFIG, params, hidden), hidden


@functools.cache
def decoder(seed: int) -> Callable:
    """A one-layer decoder, close to decoder 0, so that they often agree; it has no adapters."""
    params = jax.tree.map(lambda a, b: 0.9 * a + 0.45 * b, transformer.init(CONFIG, 0), transformer.init(CONFIG, seed))

    @functools.cache
    def read(tokens):
        padded = np.zeros(LENGTH, np.int32)
        padded[: len(tokens)] = tokens
        logits, hidden = _run(params, padded, np.int32(len(tokens)))
        return np.asarray(logits)[: len(tokens)], np.asarray(hidden)[: len(tokens)]

    return lambda tokens, adapters: read(tuple(tokens))


def table(seed: int, vocab: int, *, sharpness: float = 1.5, memory: int = 4, width: int = 4) -> Callable:
    """Next-token logits and hidden state that depend on the last `memory` tokens and the last one's adapter."""
    rng = np.random.default_rng(seed)
    states = 101
    logits = rng.normal(0, sharpness, (states, 8, vocab)).astype(np.float32)
    hidden = rng.normal(0, 1, (states, 8, width)).astype(np.float32)
    factors = rng.integers(1, states, memory)

    def read(tokens, adapters):
        padded = np.concatenate([np.zeros(memory - 1, int), np.asarray(tokens) + 1])
        windows = np.lib.stride_tricks.sliding_window_view(padded, memory)
        at = windows @ factors % states, np.asarray(adapters) + 1
        return logits[at], hidden[at]

    return read
