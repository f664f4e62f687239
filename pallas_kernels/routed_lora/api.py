"""The public function: the equation, the contract, and every check of its operands."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import common
from pallas_kernels.mesh import over_mesh
from pallas_kernels.routed_lora import gpu, tpu, vjp, xla
from pallas_kernels.routed_lora.layout import banks


def routed_lora(
    x: Float[Array, "N D"],
    a: Float[Array, "E R D"],
    b: Float[Array, "E F R"] | Float[Array, "E R F"],
    route: Int[Array, "N"] | Float[Array, "N E"],
    scale: Float[Array, "E"],
    *,
    weights: Float[Array, "N E"] | None = None,
    gate: Float[Array, "N"] | Float[Array, "N R"] | None = None,
    rank_major: bool = False,
    backend: common.Backend = "auto",
    interpret: Any = False,
) -> Float[Array, "N F"]:
    """The low-rank updates of a bank of experts, each token its own: [N F].

    With ids e = route[n]:           y_n = g_n · s_e · B_e (r_n ⊙ A_e x_n)
    With weights w = route [N E]:    y_n = g_n · Σ_e w_ne · s_e · B_e (r_n ⊙ A_e x_n)

    (LoRA: Hu et al. 2021, eq. 3; per-token routing: Shah & Wagle 2026, MoLoRA.) Sums are taken in fp32 or wider; the
    result has the dtype of x. No value of ids compiles anything. Differentiable once in every float operand, by
    reverse mode: gradients of weights, scale and gate are inner products in the rank space, and a bank that is not
    differentiated costs nothing, whatever the others do.

    Args:
      x: [N D] tokens; N may be 0.
      a: [E R D] down projections. Experts of lower rank fill up with zeros, in a or b.
      b: [E F R] up projections; [E R F] if `rank_major`, the layout of a bank that is kept: its tiles need no padding
        on TPU and GPU, and no method copies it.
      route: [N] expert of each token, or [N E] weights. An id outside [0, E), by convention -1, is no adapter: its
        row is exactly zero and gives no gradient to anything. With ids, a NaN in an expert reaches its own tokens
        only; with weights it reaches every token, also through a weight of zero.
      scale: [E], α/r of each expert.
      weights: [N E], with ids only: straight-through weights. The value is that of the ids, bit for bit, and the
        gradient of weights is that of the mixture, dw_ne = s_e g_n ⟨r_n ⊙ A_e x_n, B_eᵀ dy_n⟩ for *all* experts
        (dense straight-through). The sparse form, through the chosen expert alone, needs no argument: it is
        gate = p + stop_gradient(1 - p) with p the probability of the chosen expert.
      gate: [N] multiplies the output, [N R] the rank space.
      backend: "reference" (gather), "xla" (any platform), "tpu" or "gpu" (the Pallas kernels), or "auto": the kernel of
        the platform where it runs and was not measured slower, else xla.
      interpret: run the tpu kernel in the Pallas interpreter (True, or `pltpu.InterpretParams`), to test it on a CPU.

    Raises:
      NotSupported: the asked backend cannot run these operands here; the line says what can.
      ValueError: shapes or dtypes that do not fit.
    """
    x, a, b, route, scale = map(jnp.asarray, (x, a, b, route, scale))
    weights, gate = (None if v is None else jnp.asarray(v) for v in (weights, gate))
    ids, weights = split_route(route, weights)
    check(x, a, b, ids, weights, scale, gate, rank_major)
    if x.shape[0] == 0:
        return jnp.zeros((0, banks(a, b, rank_major).width_out), x.dtype)
    up = (None, None, "columns") if rank_major else (None, "columns", None)
    row = ("rows", None)
    run = functools.partial(_routed, backend, interpret, rank_major)
    gated = ("rows",) if gate is not None and gate.ndim == 1 else row
    ins = (row, (None, None, None), up, ("rows",), row, (None,), gated)
    return over_mesh(run, ins, ("rows", "columns"), x, a, b, ids, weights, scale, gate)


def _routed(backend, interpret, rank_major, x, a, b, ids, weights, scale, gate):
    """By the backend that suits what one device has of the operands."""
    pair = banks(a, b, rank_major)
    why_not = {"tpu": tpu.why_not(x, pair, soft=ids is None), "gpu": gpu.why_not(x, pair, soft=ids is None)}
    chosen = common.choose_backend("routed_lora", backend, why_not, interpret=bool(interpret))
    if backend == "auto" and chosen in common.KERNELS:
        chosen = (xla.measured(x.shape[0], pair) or {}).get("backend", chosen)
    return vjp.routed(chosen, interpret, rank_major, x, a, b, ids, weights, scale, gate)


def split_route(route, weights):
    """(ids or None, weights or None) of the two ways to route."""
    if jnp.issubdtype(route.dtype, jnp.integer):
        return route.astype(jnp.int32), weights
    if weights is not None:
        raise ValueError(
            "routed_lora: got weights twice, as route and as weights=; straight-through needs integer ids as route"
        )
    return None, route


def check(x, a, b, ids, weights, scale, gate, rank_major) -> None:
    """Raises ValueError, in one line, for the first operand that does not fit the others."""
    if x.ndim != 2 or a.ndim != 3 or b.ndim != 3:
        raise ValueError(f"routed_lora: got x {x.shape}, a {a.shape}, b {b.shape}, expected [N D], [E R D], [E F R]")
    (n, d), (e, r, _), f = x.shape, a.shape, b.shape[2 if rank_major else 1]
    if e == 0 or r == 0:
        raise ValueError(f"routed_lora: got a {a.shape}, expected at least one expert of rank 1 or more")
    expected = {
        "a": [(e, r, d)],
        "b": [(e, r, f) if rank_major else (e, f, r)],
        "ids": [(n,)],
        "weights": [(n, e)],
        "scale": [(e,)],
    }
    expected["gate"] = [(n,), (n, r)]
    for name, array in dict(a=a, b=b, ids=ids, weights=weights, scale=scale, gate=gate).items():
        if array is not None and array.shape not in expected[name]:
            shapes = " or ".join(str(list(s)) for s in expected[name])
            raise ValueError(f"routed_lora: got {name} {list(array.shape)}, expected {shapes} for x {[n, d]}")
    for name, array in dict(x=x, a=a, b=b, weights=weights, scale=scale, gate=gate).items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"routed_lora: got {name} of dtype {array.dtype}, expected a float")
