"""The whole routed program, compiled ahead of time by the compilers of accelerators, in a process of its own."""

import pytest

from tests.pallas_kernels import aot


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2", aot.H100])
def test_no_kv_table_is_copied(topology):
    if why := aot.missing(topology):
        pytest.skip(why)
    (facts,) = aot.reports("tests.engine.aot_worker", topology, (), timeout=1200)
    assert facts["temporary_bytes"] < facts["kv_bytes"] / 3  # a copy of either model's table would be a half
