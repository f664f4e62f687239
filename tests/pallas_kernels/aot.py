"""Compilation of kernels by the real TPU compiler, for chips that are not there, in processes of their own."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

ROOT = pathlib.Path(__file__).parents[2]
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}


def reports(worker: str, topology: str, names: Sequence[str], *, timeout: int) -> list[dict]:
    """What the module `worker` prints of each spec, a JSON object a line."""
    done = subprocess.run(
        [sys.executable, "-m", worker, topology, *names],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@contextlib.contextmanager
def chip(topology: str) -> Iterator[jax.Device]:
    """In a worker: the first chip of a topology, which kernels then take for the one they run on."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    kind = AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh):
        yield device


def compiled(lower) -> dict:
    """What compiling `lower()` took and made."""
    start = time.perf_counter()
    program = lower().compile()
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "kernels": program.as_text().count('custom_call_target="tpu_custom_call"'),
        "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
    }
