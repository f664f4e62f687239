"""Compiles the TPU kernels, forward and backward, for one chip that is not there; run by test_tpu_aot.py.

Usage: aot_worker.py TOPOLOGY SPEC...; prints one JSON object a spec.
"""

import json
import sys
import time

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from pallas_kernels.selective_scan import specs
from tests.pallas_kernels.selective_scan.run import shapes, value_and_gradients


def main(topology: str, *names: str):
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    kind = AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=kind)
    run = jax.jit(value_and_gradients, static_argnames=("backend", "interpret"))
    with jax.sharding.use_abstract_mesh(mesh):
        for name in names:
            start = time.perf_counter()
            operands = shapes(specs.DEVICE[name], sharding=SingleDeviceSharding(device))
            compiled = run.lower(*operands, backend="auto", interpret=False).compile()
            facts = {
                "spec": name,
                "seconds": round(time.perf_counter() - start, 1),
                "kernels": compiled.as_text().count('custom_call_target="tpu_custom_call"'),
                "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
            }
            print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
