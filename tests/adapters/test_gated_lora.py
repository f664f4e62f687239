"""The gated adapter as a module: plain LoRA at first, the formula afterwards, and decoding with its state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from molora_jax.adapters import gate
from molora_jax.adapters.gate import GateConfig
from molora_jax.adapters.gated_lora import GatedLoRA
from molora_jax.adapters.lora import LoRA
from tests.adapters.gate_reference import CONFIGS, D, R, params, reference, wide
from tests.numerics import assert_close

F = 5
X = np.random.default_rng(0).standard_normal((2, 6, D)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((F, D)).astype(np.float32)
BIAS = np.arange(F, dtype=np.float32)
KINDS = ("mamba", "mamba-diagonal", "mamba-of-h", "gru", "lstm", "linear", "toplora")


@functools.partial(jax.jit, static_argnums=0)
def merged(graph, params, args, kwargs):
    return nnx.merge(graph, params)(*args, **kwargs)


def run(module, *args, **kwargs):
    """`module(...)`, compiled."""
    return merged(*nnx.split(module), args, kwargs)


def filled(module, value):
    """The module with B random, so that the update counts."""
    module.b[...] = jnp.asarray(np.random.default_rng(value).standard_normal((F, R)), module.b.dtype)
    return module


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_the_first_step_is_plain_lora_to_the_bit(name, dtype):
    gated = filled(GatedLoRA(CONFIGS[name], D, F, R, alpha=8, rngs=nnx.Rngs(0), dtype=dtype), 2)
    plain = LoRA(D, F, R, alpha=8, rngs=nnx.Rngs(0), dtype=dtype)
    plain.a[...], plain.b[...] = gated.a[...], gated.b[...]
    x, weight, bias = (jnp.asarray(array, dtype) for array in (X, W, BIAS))
    y, _ = run(gated, x, weight, bias)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, run(plain, x, weight, bias))


@pytest.mark.parametrize("name", KINDS)
def test_the_formula(name):
    cfg = CONFIGS[name]
    gated = filled(GatedLoRA(cfg, D, F, R, alpha=8, rngs=nnx.Rngs(0), rslora=True), 3)
    tree = params(cfg, heads=1)
    nnx.update(gated.gate, jax.tree.map(nnx.LoRAParam, tree))
    y, state = run(gated, X, W, BIAS)
    a, b, x = wide((gated.a[...], gated.b[...], X))
    h = np.einsum("btd,rd->btr", x, a)
    lam = reference(cfg, tree, h if cfg.reads == "h" else x)[:, :, 0]
    lam = lam if cfg.output == "diagonal" else lam[:, :, None]
    want = x @ wide(W).T + wide(BIAS) + 8 / R**0.5 * np.einsum("btr,fr->btf", lam * h, b)
    assert_close(y, want, "model")
    first, state = run(gated, X[:, :4], W, BIAS)
    second, _ = run(gated, X[:, 4:], W, BIAS, state=state)
    assert_close(jnp.concatenate([first, second], axis=1), want, "model")


def test_pads_and_segments_reach_the_gate():
    gated = filled(GatedLoRA(CONFIGS["mamba"], D, F, R, alpha=8, rngs=nnx.Rngs(0)), 3)
    nnx.update(gated.gate, jax.tree.map(nnx.LoRAParam, params(CONFIGS["mamba"], heads=1)))
    valid, reset = np.ones((2, 6), bool), np.zeros((2, 6), bool)
    valid[:, 0], reset[:, 4] = False, True
    y, _ = run(gated, X, W, valid=valid, reset=reset)
    assert_close(y[:, 1:4], run(gated, X[:, 1:4], W)[0], "model")
    assert_close(y[:, 4:], run(gated, X[:, 4:], W)[0], "model")
    assert np.abs(y - run(gated, X, W)[0])[:, 1:].max() > 1e-3


def test_all_that_trains_is_found_by_its_type():
    gated = GatedLoRA(GateConfig(), D, F, R, alpha=8, rngs=nnx.Rngs(0))
    found = nnx.to_pure_dict(nnx.state(gated, nnx.LoRAParam))
    assert set(found) == {"a", "b", "gate"}
    want = gate.abstract(GateConfig(), d_in=D, rank=R)
    assert jax.tree.map(jnp.shape, found["gate"]) == jax.tree.map(lambda leaf: leaf.shape, want)
