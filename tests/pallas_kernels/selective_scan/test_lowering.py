"""The kernels lowered for devices that this machine does not have: forward and backward, with every option."""

import jax
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels.selective_scan import gpu_kernel, specs
from tests.pallas_kernels.selective_scan.run import shapes, value_and_gradients

TARGETS = {
    "tpu": (AbstractDevice("TPU v5 lite", 1, "tpu"), "tpu", "tpu_custom_call"),
    "gpu": (AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu"), "cuda", "__gpu$xla.gpu.triton"),
}


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("name", ["tiny", "block_256", "block_256_bf16", "segments"])
@pytest.mark.parametrize("platform", TARGETS)
def test_lowers_to_two_kernels(platform, name):
    if platform == "gpu" and gpu_kernel.triton is None:
        pytest.skip(f"jax {jax.__version__} has no Pallas Triton backend; the GPU takes the xla path")
    device, target, call = TARGETS[platform]
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    run = jax.jit(value_and_gradients, static_argnames=("backend", "interpret"))
    with jax.sharding.use_abstract_mesh(mesh):
        exported = export.export(
            run,
            platforms=[target],
            disabled_checks=[export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")],
        )(*shapes(specs.DEVICE[name]), backend="auto", interpret=False)
    text = exported.mlir_module()
    assert text.count(f"@{call}(") == 2
    assert "stablehlo.while" not in text
