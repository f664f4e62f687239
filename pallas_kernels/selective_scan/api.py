"""The public function: the equation, the contract, and every check of its operands."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels import common
from pallas_kernels.mesh import over_mesh
from pallas_kernels.selective_scan import gpu, tpu, vjp
from pallas_kernels.selective_scan.layout import Operands


def selective_scan(
    u: Float[Array, "B T C"],
    dt: Float[Array, "B T C"],
    A: Float[Array, "C N"],
    Bm: Float[Array, "B T N"],
    Cm: Float[Array, "B T N"],
    D: Float[Array, "C"] | None = None,
    z: Float[Array, "B T C"] | None = None,
    *,
    h0: Float[Array, "B C N"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    reset: Bool[Array, "B T"] | None = None,
    backend: common.Backend = "auto",
    interpret: Any = False,
) -> tuple[Float[Array, "B T C"], Float[Array, "B C N"]]:
    """The selective scan of Mamba (Gu & Dao 2023, §3.2 and Algorithm 2), from a state to a state: (y, h_T).

    Per batch row, channel c and state n, with zero-order hold for A and the Euler step for B:

        h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t
        y_t = (C_t · h_t + D u_t) · silu(z_t)

    A is expected negative and dt not, so that no factor exceeds 1: then nothing overflows, however large dt or T. The
    state and all sums are fp32, or wider where an operand is; y has the dtype of u and h_T that of the state. Every
    float operand has a gradient, by reverse mode, and h_T passes one back. The backward recomputes states from one
    kept every 32 to 128 tokens (the reference keeps all). Results of one backend are the same in every run.

    Args:
      u: [B T C] inputs. T may be 0: then h_T is h0.
      dt: [B T C] step sizes, after their softplus.
      A: [C N], as -exp(A_log).
      Bm, Cm: [B T N] input and output projections of each token.
      D: [C] skip, or None.
      z: [B T C] gate, or None.
      h0: [B C N] state before the first token; None is zero.
      valid: [B T], false at pads, wherever they lie: they leave the state as it is, give y = 0 whatever they hold, and
        take no gradient.
      reset: [B T], true at the first token of a segment in packed rows: the state before it, h0 included, is forgotten,
        even where it is not finite.
      backend: "reference", "xla" (any platform), "tpu" or "gpu" (the Pallas kernels), or "auto": the kernel of the
        platform if it can, but xla for a single token.
      interpret: run a kernel in the Pallas interpreter (True, or `pltpu.InterpretParams`), to test it on a CPU.

    Raises:
      NotSupported: the asked backend cannot run these operands here; the line says what can.
      ValueError: shapes or dtypes that do not fit.
    """
    u, dt, A, Bm, Cm = map(jnp.asarray, (u, dt, A, Bm, Cm))
    D, z, h0, valid, reset = (None if x is None else jnp.asarray(x) for x in (D, z, h0, valid, reset))
    check(u, dt, A, Bm, Cm, D, z, h0, valid, reset)
    if valid is not None:
        u, dt, Bm, Cm = (jnp.where(valid[:, :, None], x, 0) for x in (u, dt, Bm, Cm))
        z = None if z is None else jnp.where(valid[:, :, None], z, 0)
    (batch, length, channels), states = u.shape, A.shape[1]
    h0 = jnp.zeros((batch, channels, states), u.dtype) if h0 is None else h0
    ops = Operands(u, dt, A.T, Bm, Cm, h0.swapaxes(1, 2), reset)
    if u.size == 0:
        return jnp.zeros(u.shape, u.dtype), h0.astype(ops.acc)
    if backend == "auto" and length == 1:
        backend = "xla"
    lane, state = ("rows", None, "columns"), ("rows", None, None)
    ins = (lane, lane, (None, "columns"), state, state, lane, ("rows", None))
    y, last = over_mesh(functools.partial(_scan, backend, interpret), ins, (lane, lane), *ops)
    # Only operands are kept for the backward of the gate, not its intermediate products.
    return jax.checkpoint(skip_and_gate)(y, u, D, z), last.swapaxes(1, 2)


def _scan(backend, interpret, *ops):
    """By the backend that suits what one device has of the operands."""
    ops = Operands(*ops)
    why_not = {"tpu": tpu.why_not(ops), "gpu": gpu.why_not(ops)}
    chosen = common.choose_backend("selective_scan", backend, why_not, interpret=bool(interpret))
    return vjp.scan(chosen, interpret, ops)


def skip_and_gate(y, u, D, z):
    """(y + D u) · silu(z) in the dtype of y, cast to that of u."""
    wide = lambda x: x.astype(y.dtype)
    out = y if D is None else y + wide(D) * wide(u)
    out = out if z is None else out * jax.nn.silu(wide(z))
    return out.astype(u.dtype)


def check(u, dt, A, Bm, Cm, D, z, h0, valid, reset) -> None:
    """Raises ValueError, in one line, for the first operand that does not fit the others."""
    if u.ndim != 3 or A.ndim != 2 or A.shape[1] == 0:
        raise ValueError(f"selective_scan: got u {u.shape}, A {A.shape}, expected [B T C], [C N] with N of at least 1")
    (b, t, c), n = u.shape, A.shape[1]
    expected = dict(dt=(b, t, c), A=(c, n), Bm=(b, t, n), Cm=(b, t, n), D=(c,), z=(b, t, c), h0=(b, c, n))
    floats = dict(u=u, dt=dt, A=A, Bm=Bm, Cm=Cm, D=D, z=z, h0=h0)
    for name, shape in expected.items():
        if floats[name] is not None and floats[name].shape != shape:
            got = list(floats[name].shape)
            raise ValueError(f"selective_scan: got {name} {got}, expected {list(shape)} for u {[b, t, c]}, N = {n}")
    for name, x in floats.items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"selective_scan: got {name} of dtype {x.dtype}, expected a float")
    for name, x in dict(valid=valid, reset=reset).items():
        if x is not None and (x.shape != (b, t) or x.dtype != bool):
            raise ValueError(f"selective_scan: got {name} {list(x.shape)} of {x.dtype}, expected {[b, t]} of bool")
