"""Rotary embedding, against rotations of complex numbers and the Llama 3.1 release written out pair by pair."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.config import Rope
from molora_jax.nn import rope
from tests.numerics import assert_close


def llama3_one(freq: float, r: Rope) -> float:
    """One frequency, in the words of the release: by wavelength, with three cases."""
    wavelength = 2 * math.pi / freq
    if wavelength < r.original_positions / r.high_freq_factor:
        return freq
    if wavelength > r.original_positions / r.low_freq_factor:
        return freq / r.factor
    smooth = (r.original_positions / wavelength - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor)
    return (1 - smooth) * freq / r.factor + smooth * freq


@pytest.mark.parametrize("width", [2, 6, 64, 128])
@pytest.mark.parametrize("theta", [50.0, 10_000.0, 5e5])
def test_frequencies(width, theta):
    plain = [1 / theta ** (2 * i / width) for i in range(width // 2)]
    np.testing.assert_allclose(rope.frequencies(Rope(theta=theta), width), plain, rtol=1e-14)
    linear = rope.frequencies(Rope(theta=theta, scaling="linear", factor=8.0), width)
    np.testing.assert_allclose(linear, [f / 8 for f in plain], rtol=1e-14)


@pytest.mark.parametrize("original", [64, 8192])
def test_llama3_frequencies_keep_blend_and_divide(original):
    r = Rope(
        theta=5e5,
        scaling="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_positions=original,
    )
    plain = rope.frequencies(Rope(theta=5e5), 64)
    got = rope.frequencies(r, 64)
    np.testing.assert_allclose(got, [llama3_one(f, r) for f in plain], rtol=1e-14)
    kept, divided = np.isclose(got, plain, rtol=1e-12), np.isclose(got, plain / 32, rtol=1e-12)
    assert kept.any()
    assert divided.any()
    assert (~kept & ~divided).any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("width", [2, 10])
def test_rotate_turns_feature_i_with_i_plus_half(dtype, width):
    rng = np.random.default_rng(0)
    positions = np.array([0, 3, 3, 1, 500], np.int32)
    x = jnp.asarray(rng.standard_normal((3, width, 5)), dtype)
    freq = rope.frequencies(Rope(theta=100.0), width)
    got = jax.jit(lambda x: rope.rotate(x, *rope.rotation(freq, positions, jnp.float32)))(x)
    assert got.dtype == dtype
    x64 = np.asarray(x).astype(np.float64)
    turned = (x64[:, : width // 2] + 1j * x64[:, width // 2 :]) * np.exp(1j * freq[:, None] * positions)
    want = np.concatenate([turned.real, turned.imag], 1)
    if dtype == jnp.float32:  # an angle of 500 radians is only known to 3e-5 in fp32
        np.testing.assert_allclose(got[..., -1], want[..., -1], atol=1e-4)
        assert_close(got[..., :-1], want[..., :-1])
    else:
        assert_close(got, want)


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(1)
    q, k = jnp.asarray(rng.standard_normal((2, 1, 8, 1)), jnp.float32)
    freq = rope.frequencies(Rope(theta=100.0), 8)

    @jax.jit
    def score(at_q, at_k):
        turn = lambda x, at: rope.rotate(x, *rope.rotation(freq, at[None], jnp.float32))
        return jnp.sum(turn(q, at_q) * turn(k, at_k))

    score_of = lambda at_q, at_k: float(score(np.int32(at_q), np.int32(at_k)))
    assert abs(score_of(17, 12) - score_of(5, 0)) < 1e-4
    assert abs(score_of(17, 12) - score_of(12, 17)) > 1e-2  # and its sign matters
