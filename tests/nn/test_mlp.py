"""The gated block's activations, written out."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.nn import mlp
from tests.numerics import assert_close

BY_HAND = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("activation", mlp.ACTIVATIONS)
def test_gate_multiplies_the_activated_half(dtype, activation):
    x, y = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 7)) * 3, dtype)
    x64, y64 = (np.asarray(a).astype(np.float64) for a in (x, y))
    got = jax.jit(mlp.gate, static_argnums=2)(x, y, activation)
    assert got.dtype == dtype
    assert_close(got, np.vectorize(BY_HAND[activation])(x64) * y64)
