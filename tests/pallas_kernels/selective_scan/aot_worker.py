"""Compiles the TPU kernels, forward and backward, for one chip that is not there; run by test_tpu_aot.py.

Usage: aot_worker TOPOLOGY SPEC...; prints one JSON object a spec.
"""

import functools
import json
import sys

import jax
from jax.sharding import SingleDeviceSharding

from pallas_kernels.selective_scan import specs
from tests.pallas_kernels import aot
from tests.pallas_kernels.selective_scan.run import shapes, value_and_gradients


def main(topology: str, *names: str):
    run = jax.jit(value_and_gradients, static_argnames=("backend", "interpret"))
    with aot.chip(topology) as device:
        for name in names:
            operands = shapes(specs.DEVICE[name], sharding=SingleDeviceSharding(device))
            facts = aot.compiled(functools.partial(run.lower, *operands, backend="auto", interpret=False))
            print(json.dumps({"spec": name} | facts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
