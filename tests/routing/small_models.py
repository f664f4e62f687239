"""Tiny models to route between: decoders with random weights, and tables that know only the last token."""

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
    """A one-layer decoder, half its weights those of decoder 0, so that they often agree; it has no adapters."""
    params = jax.tree.map(lambda a, b: 0.8 * a + 0.6 * b, transformer.init(CONFIG, 0), transformer.init(CONFIG, seed))

    @functools.cache
    def read(tokens):
        padded = np.zeros(LENGTH, np.int32)
        padded[: len(tokens)] = tokens
        logits, hidden = _run(params, padded, np.int32(len(tokens)))
        return np.asarray(logits)[: len(tokens)], np.asarray(hidden)[: len(tokens)]

    return lambda tokens, adapters: read(tuple(tokens))


def table(seed: int, vocab: int, *, sharpness: float = 1.5, width: int = 4) -> Callable:
    """Next-token logits and hidden state that depend on the last token and its adapter alone."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, sharpness, (vocab, 8, vocab)).astype(np.float32)
    hidden = rng.normal(0, 1, (vocab, 8, width)).astype(np.float32)

    def read(tokens, adapters):
        at = np.asarray(tokens), np.asarray(adapters) + 1
        return logits[at], hidden[at]

    return read
