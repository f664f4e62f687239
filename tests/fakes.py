"""Tiny models: some layers of the golden ones, and configs without weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.config import ModelConfig
from molora_jax.models import transformer
from molora_jax.typing import Params
from tests import golden

LAYERS = {"gemma3": (0, 5, 6)}  # two that see a window, with the one that sees all between them


@functools.cache
def model(name: str, dtype=jnp.float32) -> tuple[ModelConfig, Params]:
    """A golden model's config and stacked weights; of a deep one only `LAYERS`."""
    cfg, params = golden.params(name, dtype)
    chosen = np.array(LAYERS.get(name, range(cfg.layers)))
    layers = jax.tree.map(lambda w: w[chosen], params["layers"])
    cfg = dataclasses.replace(cfg, layers=len(chosen), windows=tuple(cfg.windows[i] for i in chosen))
    return cfg, params | {"layers": layers}


def weights(name: str, dtype=jnp.float32, *, unrolled: bool) -> tuple[ModelConfig, Params]:
    """The same, stacked or one dict a layer."""
    cfg, params = model(name, dtype)
    return cfg, transformer.unstack(dict(params)) if unrolled else params


def config(windows: tuple[int, ...]) -> ModelConfig:
    """A config with these attention windows, for code that looks at nothing else."""
    sizes = dict(vocab=8, width=4, mlp_width=4, heads=1, kv_heads=1, head_width=4, attn_scale=0.5)
    return ModelConfig(family="llama", layers=len(windows), windows=windows, **sizes)
