"""The kernels under the TPU simulator, and lowered on a CPU for devices that are not there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels.routed_lora import reference, routed_lora, specs, tpu
from pallas_kernels.routed_lora.layout import banks

DEVICES = {
    "tpu": AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu"),
    "cuda": AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"),
}
TRITON = "__gpu$xla.gpu.triton"


@pytest.mark.parametrize("run", [tpu.packed, tpu.tiles])
def test_no_race_and_no_use_of_uninitialised_memory(run, capfd):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    n, pair = 21, banks(normal(3, 5, 256), normal(3, 128, 5))
    x, ids, mult = normal(n, 256), jnp.asarray(rng.integers(-1, 3, n), jnp.int32), normal(n, 1)
    simulator = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    try:
        y, u = run(x, pair, ids[:, None], mult, with_rank=True, interpret=simulator)
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    want_y, want_u = reference.hard(x, pair, ids, mult, with_rank=True)
    own = ids >= 0
    assert "race" not in capfd.readouterr().out.lower()  # jax 0.10 prints it, later ones raise
    np.testing.assert_allclose(y[own], want_y[own], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(u[own], want_u[own], rtol=1e-5, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["qwen3_1.7b_decode", "llama3_8b_e64_prefill"])
@pytest.mark.parametrize("platform", DEVICES)
def test_lowers_for_devices_that_are_not_there(platform, name):
    spec = specs.DEVICE[name]
    struct = lambda *shape, dtype=spec.dtype: jax.ShapeDtypeStruct(shape, dtype)
    x, gate = struct(spec.N, spec.D), struct(spec.N, dtype="float32")
    a, b = struct(spec.E, spec.R, spec.D), struct(spec.E, spec.F, spec.R)
    ids, scale = struct(spec.N, dtype="int32"), struct(spec.E, dtype="float32")

    def loss(x, gate, a, b, ids, scale):
        kernel = functools.partial(routed_lora, backend="tpu" if platform == "tpu" else "gpu")
        return jnp.sum(kernel(x, a, b, ids, scale, gate=gate).astype(jnp.float32))

    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=DEVICES[platform])
    checks = [export.DisabledSafetyCheck.custom_call(TRITON)]
    with jax.sharding.use_abstract_mesh(mesh):
        program = export.export(jax.jit(jax.grad(loss, (0, 1))), platforms=[platform], disabled_checks=checks)
        text = program(x, gate, a, b, ids, scale).mlir_module()
    call = "@tpu_custom_call" if platform == "tpu" else f"@{TRITON}"
    assert text.count(f"custom_call {call}") == 2
