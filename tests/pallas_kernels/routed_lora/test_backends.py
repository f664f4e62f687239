"""Every backend, and every method of the xla one, against the numpy oracle."""

import jax
import pytest

from pallas_kernels.routed_lora import tpu, xla
from tests.pallas_kernels.routed_lora.cases import Cases, Core, Float64Cases, SoftCases, native, unoptimised


class TestReference(Core, SoftCases, Float64Cases):
    backend = "reference"
    program = staticmethod(unoptimised)


class TestXla(Cases, SoftCases, Float64Cases):
    backend = "xla"


def forget():
    for program in (native, unoptimised):
        program.clear_cache()


class Patched(Core):
    """One choice inside a backend forced; programs compiled so must not outlive the patch."""

    patch: tuple
    program = staticmethod(unoptimised)

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _patched(cls):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(*cls.patch)
            forget()
            yield
        forget()


class TestXlaRows(Patched):
    backend = "xla"
    patch = (xla, "choose", lambda n, pair: ("rows", 1))


class TestXlaLoop(Patched):
    backend = "xla"
    patch = (xla, "choose", lambda n, pair: ("loop", 8))


class TestXlaTiles(Patched):
    backend = "xla"
    patch = (xla, "choose", lambda n, pair: ("tiles", 16))


class TestXlaCapacity(Patched):
    """Where an expert has more tokens than there is room for, the packed form stands in, or the loop."""

    backend = "xla"
    patch = (xla, "choose", lambda n, pair: ("capacity", 8))


class TestXlaCapacityLoop(Patched):
    backend = "xla"
    patch = (xla, "CROWD_LIMIT", 0)


class TestXlaPacked(Patched):
    backend = "xla"
    patch = (xla, "choose", lambda n, pair: ("packed", 0))


class TestTpu(Cases, SoftCases):
    backend = "tpu"
    interpret = True


class TestTpuTiles(Patched):
    backend = "tpu"
    interpret = True
    patch = (tpu, "PACKED_LIMIT", 8)


class TestGpu(Cases):
    """On a GPU the kernel itself, elsewhere its interpretation."""

    backend = "gpu"
    interpret = jax.default_backend() != "gpu"
