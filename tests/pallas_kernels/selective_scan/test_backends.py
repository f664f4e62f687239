"""Every backend against the numpy oracle."""

import pytest

from tests.pallas_kernels.selective_scan import oracle
from tests.pallas_kernels.selective_scan.cases import SMALL, Cases
from tests.pallas_kernels.selective_scan.hazards import Hazards


class Float64:
    @pytest.mark.parametrize("sizes", [SMALL, (2, 130, 3, 2)])
    def test_float64_stays_float64(self, sizes):
        self.check(oracle.operands(*sizes), "float64")


class TestReference(Cases, Hazards, Float64):
    backend = "reference"


class TestXla(Cases, Hazards, Float64):
    backend = "xla"


class TestTpu(Cases, Hazards):
    backend = "tpu"
    interpret = True


class TestGpu(Cases, Hazards):
    backend = "gpu"
    interpret = True
