"""Projections and norms, against fp64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from molora_jax.nn.linear import Linear, linear
from molora_jax.nn.norm import RMSNorm, rms_norm
from tests.numerics import assert_close

DTYPES = [jnp.float32, jnp.bfloat16]


def normal(shape, dtype, seed=0):
    """Standard normal values, and the same in fp64 as `dtype` rounds them."""
    x = jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)
    return x, np.asarray(x).astype(np.float64)


@pytest.mark.parametrize("tokens", [0, 1, 2, 7])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_is_w_x_plus_bias_on_columns(tokens, dtype, biased):
    x, x64 = normal((19, tokens), dtype, 1)
    w, w64 = normal((11, 19), dtype, 2)
    b, b64 = normal((11,), dtype, 3) if biased else (None, np.zeros(11))
    got = jax.jit(linear)(x, w, b)
    assert got.dtype == dtype
    assert_close(got, w64 @ x64 + b64[:, None])


@pytest.mark.parametrize("tokens", [1, 4])
def test_linear_in_bfloat16_accumulates_in_float32(tokens):
    x = jnp.ones((4097, tokens), jnp.bfloat16)  # a bf16 sum of ones stalls at 256
    got = linear(x, jnp.ones((3, 4097), jnp.bfloat16), jnp.full(3, 0.25, jnp.bfloat16), out_dtype=jnp.float32)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, 4097.25)


@pytest.mark.parametrize("stack", [(), (4,)])
def test_linear_module_declares_what_the_function_takes(stack):
    axes = ("mlp", "embed")
    module = Linear(64, 48, axes=axes, rngs=nnx.Rngs(0), bias=True, stack=stack, dtype=jnp.float32)
    assert module.weight.shape == (*stack, 48, 64)
    assert module.bias.shape == (*stack, 48)
    assert module.weight.get_metadata()["axes"] == (*(["layers"] * len(stack)), "mlp", "embed")
    assert module.bias.get_metadata()["axes"] == (*(["layers"] * len(stack)), "mlp")
    np.testing.assert_allclose(np.std(module.weight[...]), 64**-0.5, rtol=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(6, 1), (36, 5), (2, 7, 3), (1, 4), (8, 0)])
def test_rms_norm_divides_a_column_by_its_root_mean_square(dtype, offset, shape):
    x, x64 = normal(shape, dtype, 4)
    w, w64 = normal(shape[-2:-1], dtype, 5)
    got = jax.jit(rms_norm)(x, w, eps=1e-3, offset=offset)
    assert got.dtype == dtype
    assert_close(got, x64 / np.sqrt(np.mean(x64**2, -2, keepdims=True) + 1e-3) * (w64[:, None] + offset))


def test_rms_norm_of_bfloat16_accumulates_in_float32():
    x = jnp.full((4097, 1), 3.0, jnp.bfloat16)  # a bf16 sum of equal squares stalls at 256 of them
    np.testing.assert_array_equal(rms_norm(x, jnp.ones(4097, jnp.bfloat16), eps=0.0), 1)


def test_rms_norm_of_zeros_is_zero():
    np.testing.assert_array_equal(rms_norm(jnp.zeros((4, 2)), jnp.ones(4), eps=1e-6), 0)


@pytest.mark.parametrize("stack", [(), (4,)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_module_declares_the_identity(stack, offset):
    module = RMSNorm(8, offset=offset, stack=stack, dtype=jnp.float32)
    np.testing.assert_array_equal(module.weight[...], np.full((*stack, 8), 1 - offset))
    assert module.weight.get_metadata()["axes"] == (*(["layers"] * len(stack)), "norm")
