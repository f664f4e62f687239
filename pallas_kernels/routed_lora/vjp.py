"""The operation with its gradients, which stay in the rank space and are computed only for what is differentiated."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common import accumulator
from pallas_kernels.routed_lora import dense, gpu, reference, tpu, xla
from pallas_kernels.routed_lora.layout import Banks, banks, sums

OPERANDS = ("x", "a", "b", "ids", "weights", "scale", "gate")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which operands are differentiated."""

    x: bool
    a: bool
    b: bool
    ids: bool
    weights: bool
    scale: bool
    gate: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def routed(backend: str, interpret: Any, rank_major: bool, x, a, b, ids, weights, scale, gate):
    """See `api.routed_lora`; ids or weights may be None, and with both the weights are straight-through."""
    return forward(backend, interpret, rank_major, x, a, b, ids, weights, scale, gate)[0]


def forward(backend, interpret, rank_major, x, a, b, ids, weights, scale, gate, with_rank=False):
    acc, pair = accumulator(x.dtype, a.dtype, b.dtype), banks(a, b, rank_major)
    if ids is None:
        mult, rank_gate = soft_mult(acc, weights, scale, gate)
        return soft(backend, interpret, x, pair, mult, rank_gate).astype(x.dtype), None
    mult = hard_mult(acc, ids, scale, gate)
    y, u = hard(backend, interpret, x, pair, ids, mult, with_rank=with_rank)
    return y.astype(x.dtype), u


def hard_mult(acc, ids, scale, gate):
    """What multiplies the rank space of each token, [N] or [N R]; undefined where there is no expert."""
    scale = scale.astype(acc)[jnp.clip(ids, 0, len(scale) - 1)]
    if gate is None:
        return scale
    return scale * gate.astype(acc) if gate.ndim == 1 else scale[:, None] * gate.astype(acc)


def soft_mult(acc, weights, scale, gate):
    """(m [N E], r [N R] or None): what multiplies each expert, and the rank space of all."""
    mult = weights.astype(acc) * scale.astype(acc)
    if gate is None:
        return mult, None
    gate = gate.astype(acc)
    return (mult * gate[:, None], None) if gate.ndim == 1 else (mult, gate)


def hard(backend, interpret, *args, with_rank):
    if backend == "reference":
        return reference.hard(*args, with_rank=with_rank)
    if backend == "tpu":
        return tpu.hard(*args, with_rank=with_rank, interpret=interpret)
    if backend == "gpu":
        return gpu.hard(*args, with_rank=with_rank, interpret=interpret)
    return xla.hard(*args, with_rank=with_rank)


def soft(backend, interpret, *args):
    if backend == "reference":
        return reference.soft(*args)
    if backend == "tpu":
        return tpu.soft(*args, interpret=interpret)
    return dense.soft(*args)


def routed_fwd(backend, interpret, rank_major, *primals):
    values = [None if p is None else p.value for p in primals]
    want = Wanted(*(p is not None and p.perturbed for p in primals))
    y, u = forward(backend, interpret, rank_major, *values, with_rank=want.b or want.scale or want.gate)
    x, a, b, ids, weights, scale, gate = values
    soft = ids is None and (want.b or want.scale or want.gate)
    return y, (want, x if soft or want.a or want.weights else None, a, b, ids, weights, scale, gate, u)


def routed_bwd(backend, interpret, rank_major, residuals, g):
    want, x, a, b, ids, weights, scale, gate, u = residuals
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        g = jnp.zeros(g.shape, g.dtype)
    kernel = functools.partial(hard if ids is not None else soft, backend, interpret)
    pairs = banks(a, b, rank_major), banks(a, b, rank_major, transposed=True)
    if ids is None:
        grads = soft_gradients(want, kernel, x, g, *pairs, weights, scale, gate)
    else:
        grads = hard_gradients(want, kernel, x, g, u, *pairs, ids, scale, gate)
        if want.weights:
            grads["weights"] = straight_through(x, g, *pairs, ids, scale, gate)
    if want.b and not rank_major:
        grads["b"] = grads["b"].swapaxes(1, 2)
    like = dict(x=g, a=a, b=b, weights=weights, scale=scale, gate=gate)
    return tuple(grads[k].astype(like[k].dtype) if getattr(want, k) else None for k in OPERANDS)


def hard_gradients(want: Wanted, kernel, x, g, u, fwd: Banks, bwd: Banks, ids, scale, gate) -> dict:
    """With u = A_e x, v = B_eᵀ g, m the factor: dx = A_eᵀ(m ⊙ v), dm = u ⊙ v, dA_e = (m ⊙ v)xᵀ, dB_e = g(m ⊙ u)ᵀ."""
    n, experts, acc = len(g), len(scale), sums(g, fwd)
    mult = hard_mult(acc, ids, scale, gate)
    grads = {}
    grads["x"], v = kernel(g, bwd, ids, mult, with_rank=want.a or want.scale or want.gate)
    if want.a:
        grads["a"] = dense.hard_bank_gradient(v * mult.reshape(n, -1), x, ids, experts)
    if want.b:
        grads["b"] = dense.hard_bank_gradient(u * mult.reshape(n, -1), g, ids, experts)
    if want.scale or want.gate:
        q = u * v
        own = scale.astype(acc)[jnp.clip(ids, 0, experts - 1)][:, None]
        rank_gate = 1 if gate is None else gate.astype(acc).reshape(n, -1)
        grads["gate"] = q * own if gate is not None and gate.ndim == 2 else jnp.sum(q * own, axis=1)
        per_token = jnp.sum(q * rank_gate, axis=1)
        mine = ids[:, None] == jnp.arange(experts)
        grads["scale"] = jnp.sum(jnp.where(mine, per_token[:, None], 0), axis=0)
    return grads


def straight_through(x, g, fwd: Banks, bwd: Banks, ids, scale, gate):
    """dw_ne = s_e g_n ⟨r_n ⊙ A_e x_n, B_eᵀ g_n⟩ for all experts, as if y were Σ_e w_ne Δ_e; zero for tokens of none."""
    ones = jnp.ones((len(g), len(scale)), scale.dtype)
    mult, rank_gate = soft_mult(sums(g, fwd), ones, scale, gate)
    p = dense.pairing(x, g, fwd, bwd, rank_gate)
    routed_here = (ids >= 0) & (ids < len(scale))
    return jnp.where(routed_here[:, None], p * mult, 0)


def soft_gradients(want: Wanted, kernel, x, g, fwd: Banks, bwd: Banks, weights, scale, gate) -> dict:
    acc = sums(g, fwd)
    mult, rank_gate = soft_mult(acc, weights, scale, gate)
    grads = {}
    if want.x:
        grads["x"] = kernel(g, bwd, mult, rank_gate)
    if want.a:
        grads["a"] = dense.soft_bank_gradient(x, g, bwd, mult, rank_gate)
    if want.b:
        grads["b"] = dense.soft_bank_gradient(g, x, fwd, mult, rank_gate)
    if want.gate and gate.ndim == 2:
        grads["gate"] = dense.rank_pairing(x, g, fwd, bwd, mult)
    if want.weights or want.scale or (want.gate and gate.ndim == 1):
        p = dense.pairing(x, g, fwd, bwd, rank_gate)
        outer = jnp.ones((len(g), 1), acc) if gate is None or gate.ndim == 2 else gate.astype(acc)[:, None]
        grads["weights"] = p * outer * scale.astype(acc)
        grads["scale"] = jnp.sum(p * outer * weights.astype(acc), axis=0)
        grads.setdefault("gate", jnp.sum(p * weights.astype(acc) * scale.astype(acc), axis=1))
    return grads


routed.defvjp(routed_fwd, routed_bwd, symbolic_zeros=True)
