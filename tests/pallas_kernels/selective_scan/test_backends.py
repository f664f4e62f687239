"""Every backend against the numpy oracle."""

import pytest

from pallas_kernels.selective_scan import tpu_kernel
from tests.pallas_kernels.selective_scan import oracle
from tests.pallas_kernels.selective_scan.cases import (
    Lengths,
    Masks,
    Options,
    Remat,
    Shapes,
    Splits,
    States,
    Vmap,
)
from tests.pallas_kernels.selective_scan.hazards import Hazards
from tests.pallas_kernels.selective_scan.run import MEDIUM, Core


class Float64(Core):
    def test_float64_stays_float64(self):
        self.check(oracle.operands(*MEDIUM), "float64")


class TestReference(Options, Masks, Hazards, Float64):
    backend = "reference"


class TestXla(Lengths, Splits, Options, Masks, Vmap, Remat, Float64):
    backend = "xla"


class TestXlaOptimised(Shapes, Hazards):
    """The code that users run."""

    backend = "xla"
    optimised = True


class Tpu(Core):
    """Token by token, as every token of an unrolled group is compiled; test_tpu_memory.py runs whole groups."""

    backend = "tpu"
    interpret = True

    @pytest.fixture(autouse=True)
    def _token_by_token(self, monkeypatch):
        monkeypatch.setattr(tpu_kernel, "GROUP", 1)


class TestTpu(Tpu, Shapes, States, Masks, Hazards, Vmap):
    pass


@pytest.mark.slow
class TestTpuLengths(Tpu, Lengths):
    pass


class TestGpu(Shapes, States, Masks, Hazards, Vmap):
    backend = "gpu"
    interpret = True


@pytest.mark.slow
class TestGpuLengths(Lengths):
    backend = "gpu"
    interpret = True
