"""What all tests share: full matmul precision, quick compilation, repeatable examples, float64 in its own process."""

import os
import pathlib

import hypothesis
import jax
import pytest

# Tiny models spend their time in LLVM: without its optimiser the suite takes 40 % less. XLA's own passes stay.
os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}"

jax.config.update("jax_default_matmul_precision", "highest")
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

EXACT = pathlib.Path(__file__).parent / "exact"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that compare tokens run in float64, which is a setting of the whole process."""
    if not jax.config.jax_enable_x64:
        for item in items:
            if EXACT in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs JAX_ENABLE_X64=1: make test runs it"))
