"""The maths of LoRA and its kin against fp64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from molora_jax.adapters import lora
from tests.numerics import assert_close

D, F, R = 7, 5, 3


def draw(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def wide(*arrays):
    return [np.asarray(array).astype(np.float64) for array in arrays]


def reference(x, weight, a, b, scale, base_bias=None, bias=None, magnitude=None):
    """One row and one feature at a time, in fp64."""
    x, weight, a, b = wide(x, weight, a, b)
    out = np.zeros((len(x), len(weight)))
    for n, row in enumerate(x):
        for f in range(len(weight)):
            full = weight[f] + scale * sum(b[f, r] * a[r] for r in range(len(a)))
            y = row @ full + (0 if bias is None else scale * bias[f])
            y = y if magnitude is None else y * magnitude[f] / np.sqrt((full**2).sum())
            out[n, f] = y + (0 if base_bias is None else base_bias[f])
    return out


def test_scales():
    assert lora.scaling(8, 4) == 2
    assert lora.scaling(8, 4, rslora=True) == 4
    assert lora.scaling(3, 1) == lora.scaling(3, 1, rslora=True) == 3


@pytest.mark.parametrize(("rank", "d_in", "d_out"), [(1, 3, 2), (16, 300, 5)])
def test_initial_adapters_change_nothing(rank, d_in, d_out):
    a, b = lora.init(jax.random.key(0), d_in, d_out, rank)
    assert a.shape == (rank, d_in)
    assert b.shape == (d_out, rank)
    assert not b.any()
    assert np.abs(a).max() <= d_in**-0.5
    assert len(np.unique(a)) == a.size
    if a.size > 1000:
        assert np.isclose(np.var(a), 1 / (3 * d_in), rtol=0.05)
        gaussian, _ = lora.init(jax.random.key(1), d_in, d_out, rank, method="gaussian", dtype=jnp.bfloat16)
        assert gaussian.dtype == jnp.bfloat16
        assert np.isclose(np.std(np.asarray(gaussian, np.float32)), 1 / rank, rtol=0.05)


@pytest.mark.parametrize("rank", [1, R])
@pytest.mark.parametrize("rows", [0, 1, 6])
def test_delta(rows, rank):
    x, a, b, bias = draw(rows, D), draw(rank, D), draw(F, rank), draw(F)
    zero = np.zeros((F, D))
    assert_close(lora.delta(x, a, b, 0.7), reference(x, zero, a, b, 0.7))
    assert_close(lora.delta(x, a, b, 0.7, bias), reference(x, zero, a, b, 0.7, bias=bias))


def test_delta_of_any_leading_axes_and_of_mixed_dtypes():
    x, a, b = draw(2, 4, D), draw(R, D, dtype=jnp.bfloat16), draw(F, R)
    expected = reference(x.reshape(8, D), np.zeros((F, D)), a, b, 2.0).reshape(2, 4, F)
    assert_close(lora.delta(x, a, b, 2.0), expected)
    assert_close(lora.delta(x[0, 0], a, b, 2.0), expected[0, 0])
    narrow = lora.delta(x.astype(jnp.bfloat16), a, b, 2.0)
    assert narrow.dtype == jnp.bfloat16
    assert lora.delta(x.astype(jnp.bfloat16), a, b, 2.0, out_dtype=jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize("kind", ["plain", "bias", "dora"])
@pytest.mark.parametrize("base_bias", [None, draw(F, seed=9)], ids=["", "base_bias"])
@pytest.mark.parametrize("rows", [1, 6])
def test_an_adapted_projection(rows, base_bias, kind):
    x, weight, a, b = draw(rows, D), draw(F, D), draw(R, D), draw(F, R)
    own = {"plain": {}, "bias": dict(bias=draw(F)), "dora": dict(magnitude=draw(F) + 2)}[kind]
    got = lora.apply(x, weight, a, b, 1.5, base_bias=base_bias, **own)
    assert_close(got, reference(x, weight, a, b, 1.5, base_bias, **own))


def test_gradients_of_dora_pass_by_the_norm():
    x, weight, a, b, m, g = draw(6, D), draw(F, D), draw(R, D), draw(F, R), draw(F) + 2, draw(6, F)
    loss = lambda weight, a, b, m: jnp.sum(g * lora.apply(x, weight, a, b, 1.5, magnitude=m))
    got = jax.grad(loss, argnums=(0, 1, 2, 3))(weight, a, b, m)
    x, weight, a, b, m, g = wide(x, weight, a, b, m, g)
    full = weight + 1.5 * b @ a
    norm = np.linalg.norm(full, axis=1)
    back = g * m / norm  # n is a constant
    expected = (back.T @ x, 1.5 * (back @ b).T @ x, 1.5 * back.T @ (x @ a.T), (g * (x @ full.T) / norm).sum(0))
    for left, right in zip(got, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("magnitude", [None, draw(F) + 2], ids=["plain", "dora"])
def test_a_folded_weight_does_the_same(magnitude):
    x, weight, a, b = draw(6, D), draw(F, D), draw(R, D), draw(F, R)
    folded = lora.fold(weight, a, b, 1.5, magnitude)
    assert folded.dtype == np.float32
    assert_close(x @ folded.T, reference(x, weight, a, b, 1.5, magnitude=magnitude))
    np.testing.assert_array_equal(lora.fold(weight.T, a, b, 1.5, magnitude, transposed=True).T, folded)


def test_folding_is_done_in_fp32_or_wider():
    weight, a, b = draw(F, D, dtype=jnp.bfloat16), draw(R, D, dtype=jnp.bfloat16), draw(F, R, dtype=np.float16)
    assert_close(lora.fold(weight, a, b, 0.3), np.add(*wide(weight, 0.3 * np.matmul(*wide(b, a)))))
    double = lora.fold(weight.astype(np.float64), a, b, 0.3)
    assert double.dtype == np.float64
    assert_close(double, np.add(*wide(weight, 0.3 * np.matmul(*wide(b, a)))))


@pytest.mark.parametrize("kind", ["plain", "bias", "dora", "rslora"])
def test_the_module_begins_at_the_base_and_trains_only_its_own(kind):
    x, weight, bias = draw(6, D), draw(F, D), draw(F)
    kwargs = {"plain": {}, "bias": dict(bias=True), "dora": dict(dora=weight), "rslora": dict(rslora=True)}[kind]
    module = lora.LoRA(D, F, R, alpha=6, rngs=nnx.Rngs(0), **kwargs)
    assert module.scale == (6 / R**0.5 if kind == "rslora" else 2)
    assert_close(module(x, weight, bias), x.astype(np.float64) @ weight.T.astype(np.float64) + bias)
    names = {"bias": {"a", "b", "bias"}, "dora": {"a", "b", "magnitude"}}.get(kind, {"a", "b"})
    graph, params = nnx.split(module, nnx.LoRAParam)
    assert nnx.to_pure_dict(params).keys() == names
    grads = jax.grad(lambda params: jnp.sum(nnx.merge(graph, params)(x, weight, bias) ** 2))(params)
    grads = nnx.to_pure_dict(grads)
    assert not grads["a"].any()  # B is zero
    assert all(grads[name].any() for name in names - {"a"})


def test_the_module_after_training():
    x, weight = draw(6, D), draw(F, D)
    module = lora.LoRA(D, F, R, alpha=6, rngs=nnx.Rngs(0), dora=weight)
    module.b[...] = draw(F, R)
    module.magnitude[...] = draw(F) + 2
    own = dict(magnitude=np.asarray(module.magnitude[...]))
    assert_close(module(x, weight), reference(x, weight, module.a[...], module.b[...], 2.0, **own))
