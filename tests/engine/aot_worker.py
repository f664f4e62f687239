"""Compiles a routed engine's whole program for a chip that is not there, and says what memory it wants."""

import functools
import json
import sys

import jax
import numpy as np

from molora_jax.config import ModelConfig
from molora_jax.engine import fused
from molora_jax.engine.request import EngineConfig
from molora_jax.engine.routed import Model, RoutedEngine, _look
from molora_jax.models import transformer
from molora_jax.routing.programs.bernoulli import Bernoulli
from tests.pallas_kernels import aot

PAGES = 2048


def model() -> Model:
    """Three layers, two of which see a window; a KV row is as wide as a TPU's lanes, as every real model's is."""
    cfg = ModelConfig(
        family="llama",
        vocab=256,
        layers=3,
        width=128,
        mlp_width=256,
        heads=2,
        kv_heads=1,
        head_width=64,
        windows=(32, 0, 32),
        tied=False,
        attn_scale=0.125,
    )
    return Model(cfg, transformer.init(cfg, 0))


def engine() -> RoutedEngine:
    """Two models, and KV tables much larger than all else."""
    config = EngineConfig(max_rows=4, max_length=256, prefill_chunk=16, block=4, pages=(PAGES, PAGES))
    return RoutedEngine([model()] * 2, Bernoulli(), config=config)


def main(topology: str) -> None:
    routed = engine()
    args = (routed.weights, routed.schedule, routed._memories, routed._table, np.zeros(4, np.int32))
    args += (np.int32(4), np.bool_(False), np.int32(fused.NONE))
    with aot.chip(topology) as device:
        there = jax.sharding.SingleDeviceSharding(device)
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there), args)
        run = jax.jit(functools.partial(_look, routed.plan), donate_argnums=(2, 3))
        facts = aot.compiled(lambda: run.lower(*abstract))
    print(json.dumps(facts | {"kv_bytes": routed.kv_bytes}))


if __name__ == "__main__":
    main(sys.argv[1])
