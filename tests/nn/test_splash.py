"""The TPU kernel for long rows, in the interpreter: the values and gradients of dense attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.nn import attention, splash
from molora_jax.nn.layout import dense
from tests.numerics import assert_close

B, T, H, K, D = 2, 150, 4, 2, 8
WINDOWS = (0, 0, 37)


def layout(kind: str):
    """Rows that are no multiple of a tile: whole, padded left and right, or of three documents and pads after them."""
    valid = np.ones((B, T), bool)
    segments = np.zeros((B, T), np.int32)
    if kind == "pads":
        valid[0, :9], valid[1, -20:] = False, False
    if kind == "packed":
        segments[:, 40:41], segments[:, 41:] = 1, 2
        valid[1, 130:] = False
    return dense(B, T, valid=valid, segments=segments)


def by_kernel(q, k, v, layout, *, window, scale):
    rows = (x.reshape(-1, D, B, T).transpose(2, 0, 3, 1) for x in (q * scale, k, v))
    out = splash.splash_attention(*rows, layout, window=window, windows=WINDOWS, interpret=True)
    return out.transpose(1, 3, 0, 2).reshape(H, D, B * T)


@functools.partial(jax.jit, static_argnums=0)
def run(attend, operands, weights, layout, window):
    def loss(operands):
        out = attend(*operands, layout, window=window, scale=0.4) * layout.valid.reshape(-1)
        return jnp.sum(weights * out), out

    (_, out), grads = jax.value_and_grad(loss, has_aux=True)(operands)
    return out, grads


@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize("kind", ["whole", "pads", "packed"])
def test_the_kernel_gives_what_dense_attention_gives(kind, window):
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(rng.standard_normal((heads, D, B * T)), jnp.float32) for heads in (H, K, K)]
    weights = jnp.asarray(rng.standard_normal((H, D, B * T)), jnp.float32)
    got, want = (run(f, operands, weights, layout(kind), window) for f in (by_kernel, attention.dense_attention))
    jax.tree.map(lambda a, b: assert_close(a, b, "model"), got, want)
