"""Kernels under a mesh of devices: each device with its part, and the values and gradients of the whole."""

import subprocess
import sys

from tests.pallas_kernels.aot import ROOT


def test_kernels_on_eight_devices_give_what_the_oracles_give():
    command = [sys.executable, "-m", "tests.pallas_kernels.mesh_worker"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 12
