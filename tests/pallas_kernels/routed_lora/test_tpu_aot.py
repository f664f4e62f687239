"""Ahead-of-time compilation of the TPU kernels, forward and backward, by the real TPU compiler and without a TPU."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from pallas_kernels.routed_lora import specs

WORKER = pathlib.Path(__file__).with_name("aot_worker.py")
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the TPU compiler is not installed: pip install 'molora_jax[tpu]'",
)
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_compiles_for_a_tpu_that_is_not_there(topology):
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(WORKER.parents[3])}
    names = [name for name in specs.DEVICE if "e64" not in name]
    command = [sys.executable, str(WORKER), topology, *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    reports = {report["shape"]: report for report in map(json.loads, done.stdout.splitlines())}
    assert set(reports) == set(names)
    for name, report in reports.items():
        spec = specs.DEVICE[name]
        assert report["forward"]["kernels"] == 1
        assert report["backward"]["kernels"] == 2
        # The rank space stays in VMEM and the banks are not copied: forward needs no memory but a few row factors.
        assert report["forward"]["temp_bytes"] < max(2**20, spec.N * spec.R * 4)
