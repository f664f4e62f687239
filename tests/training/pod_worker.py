"""Compiles whole training steps for four TPU chips that are not there, and says what memory and kernels they have.

Usage: pod_worker TOPOLOGY KIND...; prints one JSON object a kind of adapter.
"""

import functools
import json
import sys

import jax
import numpy as np
from jax.experimental import topologies

from molora_jax import sharding
from molora_jax.config import ModelConfig
from molora_jax.models import transformer
from molora_jax.training import specialist
from molora_jax.training.batch import batch
from molora_jax.training.optimiser import OptimiserConfig, optimiser
from molora_jax.training.partition import partition
from molora_jax.training.placement import Placement
from molora_jax.training.step import _first, _step
from tests.pallas_kernels import aot

SIZES = dict(vocab=512, layers=2, width=256, mlp_width=512, heads=4, kv_heads=2, head_width=64)
CFG = ModelConfig(family="llama", windows=(0, 512), tied=False, attn_scale=0.125, **SIZES)
ROWS, LENGTH = 4, 2048


def step(kind: str, place: Placement):
    """(the step of `Trainer`, abstract arguments with their places on the mesh)."""
    params = transformer.init(CFG, 0)
    adapter = specialist.new(CFG, params, specialist.named(kind), "x")
    config = OptimiserConfig(groups=specialist.groups(adapter, rate=1e-3, gate_rate=1e-3, decay=0.0))
    parts, trained, frozen = partition(specialist.tree(params, adapter, unroll=False), config.trains)
    update = optimiser(config, trained)
    state = jax.eval_shape(functools.partial(_first, update, 0), trained)
    like = lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
    state = jax.tree.map(like, state, place.state(state, trained))
    frozen = {path: like(leaf, place.sharding(path, leaf.shape)) for path, leaf in frozen.items()}
    rows = batch(np.ones((ROWS, LENGTH), np.int32))
    rows = jax.tree.map(lambda leaf: like(leaf, sharding.rows(place.mesh)), rows)
    run = jax.jit(functools.partial(_step, parts, specialist.loss(CFG), update, 1), donate_argnums=0)
    return run, (state, frozen, rows)


def main(topology: str, *kinds: str) -> None:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    place = Placement.of(CFG, sharding.mesh(sharding.MeshConfig(fsdp=2, tensor=2), devices))
    for kind in kinds:
        run, abstract = step(kind, place)
        with jax.set_mesh(place.mesh):
            facts = aot.compiled(functools.partial(run.lower, *abstract))
        print(json.dumps({"kind": kind} | facts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
