"""Compiles the TPU kernels, forward and backward, for one chip that is not there; run by test_tpu_aot.py.

Usage: aot_worker TOPOLOGY SHAPE...; prints one JSON object a shape.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from pallas_kernels.routed_lora import routed_lora, specs
from tests.pallas_kernels import aot


def forward(x, a, b, ids, scale, gate):
    return routed_lora(x, a, b, ids, scale, gate=gate)


def loss(x, gate, scale, a, b, ids):
    return jnp.sum(forward(x, a, b, ids, scale, gate).astype(jnp.float32))


def compile_shape(spec, device, fn, order):
    def array(*shape, dtype=spec.dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    operands = {
        "x": array(spec.N, spec.D),
        "a": array(spec.E, spec.R, spec.D),
        "b": array(spec.E, spec.F, spec.R),
        "ids": array(spec.N, dtype="int32"),
        "scale": array(spec.E, dtype="float32"),
        "gate": array(spec.N, dtype="float32"),
    }
    return aot.compiled(functools.partial(jax.jit(fn).lower, *(operands[name] for name in order)))


def main(topology: str, *names: str):
    backward = jax.grad(loss, argnums=(0, 1, 2))
    with aot.chip(topology) as device:
        for name in names:
            run = functools.partial(compile_shape, specs.DEVICE[name], device)
            report = {
                "shape": name,
                "device": device.device_kind,
                "forward": run(forward, ("x", "a", "b", "ids", "scale", "gate")),
                "backward": run(backward, ("x", "gate", "scale", "a", "b", "ids")),
            }
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
