"""What the benchmark of adapters compares computes the same thing; a swap happens while requests run."""

import numpy as np
import pytest

from experiments.adapter_costs import ops, runs
from molora_jax.config import ModelConfig
from molora_jax.models import transformer

SIZES = dict(vocab=61, layers=2, width=32, mlp_width=40, heads=2, kv_heads=1, head_width=16, attn_scale=0.25)


@pytest.mark.parametrize("way", [ops.one_hot, ops.concatenated, ops.ragged_dot], ids=lambda way: way.__name__)
def test_other_ways_to_write_the_op_give_its_result(way):
    rng = np.random.default_rng(0)
    x, a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((13, 9), (5, 3, 9), (5, 3, 7)))
    ids, scale = rng.choice([0, 1, 4], 13), rng.uniform(0.5, 2, 5).astype(np.float32)
    want = np.einsum("n,nd,nrd,nrf->nf", scale[ids], x, a[ids], b[ids], dtype=np.float64)
    got = way(x, a.swapaxes(1, 2) if way is ops.ragged_dot else a, b, ids, scale)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_an_expert_is_swapped_while_others_run_and_nothing_compiles():
    cfg = ModelConfig(family="llama", windows=(0, 0), **SIZES)
    params = transformer.unstack(transformer.init(cfg))
    running = runs.engine(cfg, params, runs.library(cfg, params, 3))
    runs.decode(running, 4)
    assert runs.swap(running, runs.adapter(cfg, params, "0", 9)) == (1, 0)
