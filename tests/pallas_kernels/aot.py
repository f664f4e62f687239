"""Compilation of kernels by the real TPU compiler, for chips that are not there, in processes of their own."""

import contextlib
import importlib.util
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


H100 = "h100"
"""Instead of a TPU's topology; its compiler is NVIDIA's, in packages that are no requirement of ours."""


def missing(topology: str) -> str | None:
    """Why the compiler of a topology cannot be asked here; None where it can."""
    package, mend = "libtpu", "needs the TPU compiler: pip install 'molora_jax[tpu]'"
    if topology == H100:
        package = "jax_cuda13_plugin"
        mend = "needs the CUDA compiler: pip install jax-cuda13-plugin nvidia-cuda-nvcc nvidia-nvvm"
    return None if importlib.util.find_spec(package) else mend


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
    """In a worker: the first chip of a topology, or `H100`, which kernels then take for the one they run on."""
    platform, cores = "tpu", 1
    how = dict(platform="tpu", topology_name=topology)
    if topology == H100:
        config = (ROOT / "tests/pallas_kernels/h100.txtpb").read_text()
        platform, cores, how = "gpu", 132, dict(platform="cuda", target_config=config, topology="1x1x1")
    device = topologies.get_topology_desc(**how).devices[0]
    kind = AbstractDevice(device_kind=device.device_kind, num_cores=cores, platform=platform)
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
