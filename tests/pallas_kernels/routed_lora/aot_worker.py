"""Compiles the TPU kernels, forward and backward, for one chip that is not there; run by test_tpu_aot.py.

Usage: aot_worker.py TOPOLOGY SHAPE...; prints one JSON object a shape.
"""

import functools
import json
import sys
import time

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from pallas_kernels.routed_lora import routed_lora, specs


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
    start = time.perf_counter()
    compiled = jax.jit(fn).lower(*(operands[name] for name in order)).compile()
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "kernels": compiled.as_text().count('custom_call_target="tpu_custom_call"'),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def main(topology: str, *names: str):
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    kind = AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=kind)
    backward = jax.grad(loss, argnums=(0, 1, 2))
    with jax.sharding.use_abstract_mesh(mesh):
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
