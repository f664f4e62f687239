"""Rotary position embedding."""

import math

import jax.numpy as jnp
import numpy as np

from molora_jax.config import Rope
from molora_jax.typing import Array, Float, Int


def frequencies(rope: Rope, head_width: int) -> np.ndarray:
    """Radians a position turns each pair of features by: [d/2], float64 (Su et al. 2021, §3.4.2).

    `llama3` scaling follows the Llama 3.1 release: with wavelength λ and blend
    s = (original/λ - low) / (high - low), f' = f/factor where s < 0, f where s > 1, else (1-s)·f/factor + s·f.
    """
    freq = rope.theta ** -(np.arange(0, head_width, 2, dtype=np.float64) / head_width)
    if rope.scaling == "linear":
        return freq / rope.factor
    if rope.scaling == "llama3":
        turns = rope.original_positions * freq / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        return freq * (blend + (1 - blend) / rope.factor)
    return freq


def rotation(freq: Float[Array, "half"], positions: Int[Array, "N"], dtype) -> tuple[Array, Array]:
    """cos and sin of every token's angles, each [d/2, N]; angles are taken in `dtype`, fp32 or wider."""
    angles = jnp.asarray(freq, dtype)[:, None] * positions.astype(dtype)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "H d N"], cos: Float[Array, "half N"], sin: Float[Array, "half N"]) -> Float[Array, "H d N"]:
    """Turns feature i together with feature i + d/2, as HF's weights expect."""
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-2)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-2).astype(x.dtype)
