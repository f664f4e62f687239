"""The TPU kernels compiled ahead of time by the compiler of real chips, in processes of their own."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from pallas_kernels.selective_scan import specs

ROOT = pathlib.Path(__file__).parents[3]
WORKER = "tests.pallas_kernels.selective_scan.aot_worker"
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_chip_compiler_takes_every_shape(topology):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the TPU compiler: pip install 'molora_jax[tpu]'")
    done = subprocess.run(
        [sys.executable, "-m", WORKER, topology, *specs.DEVICE],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    facts = {fact["spec"]: fact for fact in map(json.loads, done.stdout.splitlines())}
    assert facts.keys() == specs.DEVICE.keys()
    assert {fact["kernels"] for fact in facts.values()} == {2}
    for name, fact in facts.items():
        B, T, C, N = specs.DEVICE[name].sizes
        assert fact["temporary_bytes"] < 4 * B * T * C * N, f"{name} keeps the state of every token"
