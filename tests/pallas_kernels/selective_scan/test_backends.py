"""Every backend against the numpy oracle."""

import pytest

from pallas_kernels.selective_scan import tpu_kernel
from tests.pallas_kernels.selective_scan import oracle
from tests.pallas_kernels.selective_scan.cases import Lengths, Masks, Remat, Shapes, States, Vmap
from tests.pallas_kernels.selective_scan.hazards import Hazards
from tests.pallas_kernels.selective_scan.run import MEDIUM, Core


class Float64(Core):
    def test_float64_stays_float64(self):
        self.check(oracle.operands(*MEDIUM), "float64")


class TestReference(Masks, Hazards, Float64):
    backend = "reference"


class TestXla(Shapes, Lengths, States, Masks, Hazards, Vmap, Remat, Float64):
    backend = "xla"


class Tpu(Core):
    """Token by token: the interpreter compiles every token of an unrolled group, and one group tells enough."""

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


class TestTpuGroups(Core):
    backend = "tpu"
    interpret = True

    def test_groups_of_tokens(self):
        ops = oracle.operands(1, 130, 5, 4)
        ops["reset"][:, [5, 66]] = True
        self.check(ops)


class TestGpu(Shapes, States, Masks, Hazards, Vmap):
    backend = "gpu"
    interpret = True


@pytest.mark.slow
class TestGpuLengths(Lengths):
    backend = "gpu"
    interpret = True
