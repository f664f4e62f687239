"""Rows that attend some queries at a time: the values and gradients of all at once, without all scores at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.nn import attention
from molora_jax.nn.layout import Dense
from tests.nn.test_attention import SCALE, columns, dense_layout, normal
from tests.numerics import assert_close

H, K, D = 6, 2, 4


def run(layout, window: int, dtype=jnp.float64):
    """Output and gradients of random operands."""
    rng = np.random.default_rng(1)
    operands = [columns(normal(rng, layout.valid.size, heads, D, dtype=dtype)[0]) for heads in (H, K, K)]
    weights = rng.standard_normal((H, D, layout.valid.size)) * np.asarray(layout.valid).reshape(-1)

    def loss(*operands):
        out = attention.dense_attention(*operands, layout, window=window, scale=SCALE)
        return jnp.sum(weights * out), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*operands)
    return (np.asarray(out) * np.asarray(layout.valid).reshape(-1), *grads)


@pytest.mark.parametrize("queries", [1, 5, 64])
@pytest.mark.parametrize("kind", ["row", "pads", "packed"])
def test_some_queries_at_a_time_give_what_all_give(kind, queries, monkeypatch):
    with jax.enable_x64(True):
        layout = dense_layout(np.random.default_rng(0), kind)
        for window in (0, 3):
            want = run(layout, window)
            monkeypatch.setattr(attention, "LONG", 2)
            monkeypatch.setattr(attention, "QUERIES", queries)
            got = run(layout, window)
            monkeypatch.undo()
            jax.tree.map(lambda a, b: assert_close(a, b, "model"), got, want)


def test_scores_of_all_pairs_of_a_long_row_never_exist():
    rows, length = 2, 4096
    whole = np.ones((rows, length))
    layout = Dense((rows, length), whole.cumsum(1).astype(np.int32), whole.astype(bool), whole.astype(np.int32))
    shapes = [jax.ShapeDtypeStruct((heads, D, rows * length), jnp.float32) for heads in (H, K, K)]
    how = dict(window=0, scale=SCALE)
    loss = lambda *operands: jnp.sum(attention.dense_attention(*operands, layout, **how) ** 2)
    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes)
    assert f"{length}x{length}" not in lowered.as_text()
    all_scores = rows * H * length * length * 4
    assert lowered.compile().memory_analysis().temp_size_in_bytes < all_scores / 2
