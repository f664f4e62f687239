"""Both kernels on a mesh of eight simulated devices against their oracles: prints the names of what was compared.

In a process of its own, because the number of devices is one of its settings.
"""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.routed_lora import routed_lora
from tests.pallas_kernels.routed_lora import oracle as lora
from tests.pallas_kernels.selective_scan import oracle as scan
from tests.pallas_kernels.selective_scan.run import rounded, value_and_gradients

BACKENDS = dict(xla=False, tpu=True)  # and whether in the interpreter
DIVIDED, WHOLE = (4, 5, 6, 3), (3, 5, 7, 3)  # sizes that divide over the devices, and sizes that do not


def close(got, want) -> None:
    assert np.max(np.abs(np.asarray(got, np.float64) - want)) < 1e-5 * max(np.max(np.abs(want)), 1e-3)


def scanned(sizes, backend: str) -> None:
    ops, ends = scan.operands(*sizes), scan.cotangents(*sizes)
    ops["valid"][0, :2], ops["reset"][:, 3] = False, True
    low, low_ends = (rounded(x, "float32")[0] for x in (ops, ends))
    run = jax.jit(value_and_gradients, static_argnames=("backend", "interpret"))
    (y, last), grads = run(low, **low_ends, backend=backend, interpret=BACKENDS[backend])
    jax.tree.map(close, (y, last), scan.value(ops))
    want = scan.gradients(ops, **ends)
    jax.tree.map(close, grads, {name: want[name] for name in grads})


def routed(mesh, count: int, wide: int, backend: str, *, gate: int, soft: bool) -> None:
    ops, dy = lora.operands(count, 6, wide, 3, 2, gate=gate)
    low = {name: x if x is None or name == "route" else jnp.asarray(x, jnp.float32) for name, x in ops.items()}
    route = "weights" if soft else "route"
    still = ("route",) if soft else ("route", "weights")
    moving = {name: x for name, x in low.items() if x is not None and name not in still}

    def run(moving):
        how = dict(gate=moving.get("gate"), backend=backend, interpret=BACKENDS[backend])
        return routed_lora(*(moving[name] for name in ("x", "a", "b")), (low | moving)[route], moving["scale"], **how)

    out, pull_back = jax.vjp(jax.jit(run), moving)
    close(out, lora.value(ops, soft=soft))
    cut = (("data", "fsdp") if count % 4 == 0 else None, "tensor" if wide % 2 == 0 else None)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*cut)), 2)
    want = lora.gradients(ops, dy, soft=soft)
    grads = pull_back(jnp.asarray(dy, jnp.float32))[0]
    jax.tree.map(close, grads, {name: want[name] for name in grads})


def main() -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        for backend in BACKENDS:
            for sizes in (DIVIDED, WHOLE):
                scanned(sizes, backend)
                print("scan", backend, *sizes, flush=True)
            for count, wide, gate, soft in ((8, 4, 0, False), (8, 4, 2, True), (7, 4, 1, False), (8, 5, 1, True)):
                routed(mesh, count, wide, backend, gate=gate, soft=soft)
                print("routed", backend, count, wide, flush=True)


if __name__ == "__main__":
    main()
