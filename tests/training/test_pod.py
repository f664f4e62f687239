"""The whole training step over a mesh of TPU chips, compiled by the TPU's own compiler, in a process of its own."""

import pytest

from tests.pallas_kernels import aot

SITES, INPUTS, WINDOWS = 7, 4, 2
ATTENTION = 3 * WINDOWS  # forward, and backward for queries and for keys
ADAPTERS, GATES = 2 * SITES, 2 * INPUTS  # forward and backward; the gates of one input are one scan


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_a_step_with_every_kernel_compiles_for_four_chips(topology):
    if why := aot.missing(topology):
        pytest.skip(why)
    reports = aot.reports("tests.training.pod_worker", topology, ("lora", "malora"), timeout=1800)
    found = {report["kind"]: report["kernels"] for report in reports}
    assert found == dict(lora=ADAPTERS + ATTENTION, malora=ADAPTERS + GATES + ATTENTION)
