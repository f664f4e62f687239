"""The gradient of the recurrence, as the reverse recurrence that each backend runs in its own way."""

import functools
import types

import jax

from pallas_kernels.selective_scan import gpu, reference, tpu, xla
from pallas_kernels.selective_scan.layout import Operands

BACKENDS: dict[str, types.ModuleType] = {"xla": xla, "tpu": tpu, "gpu": gpu}


def scan(backend: str, interpret, ops: Operands) -> tuple[jax.Array, jax.Array]:
    """`reference.scan`, by the backend of that name."""
    return reference.scan(ops) if backend == "reference" else recurrence(backend, interpret, ops)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def recurrence(backend, interpret, ops):
    y, last, _ = BACKENDS[backend].forward(ops, starts=False, interpret=interpret)
    return y, last


def _forward(backend, interpret, ops):
    y, last, starts = BACKENDS[backend].forward(ops, starts=True, interpret=interpret)
    return (y, last), (ops, starts)


def _backward(backend, interpret, residuals, cotangents):
    """With g_t = ∂L/∂h_t and p_t = exp(dt_t A) h_{t-1}:

    g_t = C_t dy_t + exp(dt_{t+1} A) g_{t+1}, from g_T = C_T dy_T + dh_T
    dC_t = Σ_c h_t dy_t          dB_t = Σ_c g_t dt_t u_t        du_t = dt_t Σ_n g_t B_t
    ddt_t = Σ_n g_t (A p_t + u_t B_t)       dA = Σ_bt g_t dt_t p_t       dh_0 = exp(dt_1 A) g_1
    """
    ops, starts = residuals
    return (BACKENDS[backend].backward(ops, starts, *cotangents, interpret=interpret),)


recurrence.defvjp(_forward, _backward)
