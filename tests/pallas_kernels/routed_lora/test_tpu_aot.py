"""Ahead-of-time compilation of the TPU kernels, forward and backward, by the real TPU compiler and without a TPU."""

import pytest

from pallas_kernels.routed_lora import specs
from tests.pallas_kernels import aot

WORKER = "tests.pallas_kernels.routed_lora.aot_worker"


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_compiles_for_a_tpu_that_is_not_there(topology):
    if why := aot.missing(topology):
        pytest.skip(why)
    names = [name for name in specs.DEVICE if "e64" not in name]
    reports = {report["shape"]: report for report in aot.reports(WORKER, topology, names, timeout=600)}
    assert set(reports) == set(names)
    for name, report in reports.items():
        spec = specs.DEVICE[name]
        assert report["forward"]["kernels"] == 1
        assert report["backward"]["kernels"] == 2
        # The rank space stays in VMEM and the banks are not copied: forward needs no memory but a few row factors.
        assert report["forward"]["temporary_bytes"] < max(2**20, spec.N * spec.R * 4)
