"""What all tests share: full matmul precision, quick and bounded compilation, repeatable examples, float64 apart."""

import gc
import os
import pathlib
from collections.abc import Iterator

import hypothesis
import jax
import pytest

# Tiny models spend their time in compilation. XLA's own passes stay; LLVM gets one module a program and optimises
# nothing, and kernels come from the emitters that go without MLIR, where XLA still has them (halves what is left).
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{FLAGS} {os.environ.get('XLA_FLAGS', '')}"

jax.config.update("jax_default_matmul_precision", "highest")
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

EXACT = pathlib.Path(__file__).parent / "exact"
MAPS = pathlib.Path("/proc/self/maps")  # Linux only
MOST_MAPS = 45_000  # a process may have 65,530 and the largest file of tests adds 9,000: the one past it is a crash


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Drops compiled programs between files when they fill the process's memory maps, of which each takes several."""
    yield
    if MAPS.exists() and len(MAPS.read_text().splitlines()) > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that compare tokens run in float64, which is a setting of the whole process."""
    if not jax.config.jax_enable_x64:
        for item in items:
            if EXACT in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs JAX_ENABLE_X64=1: make test runs it"))
