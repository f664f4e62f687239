"""The whole routed program, compiled ahead of time by the TPU's own compiler, in a process of its own."""

import importlib.util

import pytest

from tests.pallas_kernels import aot


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_no_kv_table_is_copied_on_a_tpu(topology):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the TPU compiler: pip install 'molora_jax[tpu]'")
    (facts,) = aot.reports("tests.engine.aot_worker", topology, (), timeout=1200)
    assert facts["temporary_bytes"] < facts["kv_bytes"] / 3  # a copy of either model's table would be a half
