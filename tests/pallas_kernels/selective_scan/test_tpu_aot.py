"""The TPU kernels compiled ahead of time by the compiler of real chips, in processes of their own."""

import pytest

from pallas_kernels.selective_scan import specs
from tests.pallas_kernels import aot

WORKER = "tests.pallas_kernels.selective_scan.aot_worker"


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_chip_compiler_takes_every_shape(topology):
    if why := aot.missing(topology):
        pytest.skip(why)
    facts = {fact["spec"]: fact for fact in aot.reports(WORKER, topology, list(specs.DEVICE), timeout=300)}
    assert facts.keys() == specs.DEVICE.keys()
    assert {fact["kernels"] for fact in facts.values()} == {2}
    for name, fact in facts.items():
        B, T, C, N = specs.DEVICE[name].sizes
        assert fact["temporary_bytes"] < 4 * B * T * C * N, f"{name} keeps the state of every token"
