"""What needs every expert of every token: soft mixtures and the gradients of weights and banks, in bounded memory."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import accumulator, round_up
from pallas_kernels.routed_lora import reference, schedule
from pallas_kernels.routed_lora.layout import Banks, product, sums

CHUNK_LIMIT = 2**23  # elements of the rank space [rows E R] held at a time: 32 MB in fp32


def soft(x, pair: Banks, mult, rank_gate=None):
    """`reference.soft` in chunks of tokens."""
    run = lambda x, m, r: reference.soft(x, pair, m, r)
    return by_rows(run, chunk_rows(pair), x, mult, rank_gate)


def pairing(x, g, fwd: Banks, bwd: Banks, rank_gate=None):
    """p_ne = ⟨r_n ⊙ A_e x_n, B_eᵀ g_n⟩ for every expert: [N E], and never an output of width F per expert."""

    def run(x, g, r):
        u = product(f"nd,{fwd.down_axes}->ner", x, fwd.down, sums(x, fwd))
        v = product(f"nd,{bwd.down_axes}->ner", g, bwd.down, sums(g, bwd))
        return jnp.sum(u * v if r is None else u * v * r[:, None], axis=2)

    return by_rows(run, chunk_rows(fwd), x, g, rank_gate)


def rank_pairing(x, g, fwd: Banks, bwd: Banks, mult):
    """q_nr = Σ_e m_ne (A_e x_n)_r (B_eᵀ g_n)_r: [N R], the gradient of a rank gate under soft weights."""

    def run(x, g, m):
        u = product(f"nd,{fwd.down_axes}->ner", x, fwd.down, sums(x, fwd))
        v = product(f"nd,{bwd.down_axes}->ner", g, bwd.down, sums(g, bwd))
        return jnp.sum(u * v * m[:, :, None], axis=1)

    return by_rows(run, chunk_rows(fwd), x, g, mult)


def soft_bank_gradient(x, g, pair: Banks, mult, rank_gate):
    """Σ_n m_ne (r_n ⊙ down_e g_n) x_nᵀ: [E R D], the gradient of the bank that x meets.

    `pair.down` is the bank that g meets: the gradient of a takes (x, g, banks transposed), that of b (g, x, banks).
    """

    def run(x, g, m, r):
        v = product(f"nd,{pair.down_axes}->ner", g, pair.down, sums(g, pair)) * m[:, :, None]
        v = v if r is None else v * r[:, None]
        return product("ner,nd->erd", v, x.astype(v.dtype), v.dtype)

    return sum_rows(run, chunk_rows(pair), x, g, mult, rank_gate)


def hard_bank_gradient(v, x, ids, experts: int, tile: int = 64):
    """Σ over the tokens n of expert e of v_n x_nᵀ: [E R D] from v [N R] and x [N D]; other tokens add nothing."""
    acc = accumulator(v.dtype, x.dtype)
    x, v = x.astype(acc), v.astype(acc)
    if experts == 1:
        mine = (ids == 0)[None]  # as columns, like `xla.alone`
        return product("rn,dn->rd", jnp.where(mine, v.T, 0), jnp.where(mine, x.T, 0), acc)[None]
    plan = schedule.sort(ids, experts, tile)
    pad = lambda y: jnp.pad(y[plan.order], ((0, tile), (0, 0)))
    xs, vs = pad(x), pad(v)

    def body(t, bank):
        mine = (jnp.arange(tile) < plan.size[t])[:, None]
        rows = lambda y: jnp.where(mine, schedule.take(y, plan.start[t], tile), 0)
        return bank.at[plan.expert[t]].add(product("nr,nd->rd", rows(vs), rows(xs), acc))

    return lax.fori_loop(0, plan.count, body, jnp.zeros((experts, v.shape[1], x.shape[1]), acc))


def chunk_rows(pair: Banks) -> int:
    return max(CHUNK_LIMIT // (pair.experts * pair.rank), 128)


def by_rows(run, rows: int, *args):
    """`run` on chunks of the leading axis, one after another; arguments that are None stay so."""
    n = len(args[0])
    if n <= rows:
        return run(*args)
    out = lax.map(lambda chunk: run(*chunk), chunked(rows, args))
    return out.reshape(-1, *out.shape[2:])[:n]


def sum_rows(run, rows: int, *args):
    """Sum of `run` over chunks of the leading axis; the rows that fill the last one are zero."""
    if len(args[0]) <= rows:
        return run(*args)
    chunks = chunked(rows, args)
    first = jax.eval_shape(lambda c: run(*jax.tree.map(lambda v: v[0], c)), chunks)
    add = lambda total, chunk: (total + run(*chunk), None)
    return lax.scan(add, jnp.zeros(first.shape, first.dtype), chunks)[0]


def chunked(rows: int, args):
    def cut(v):
        pad = round_up(len(v), rows) - len(v)
        return jnp.pad(v, ((0, pad), *((0, 0),) * (v.ndim - 1))).reshape(-1, rows, *v.shape[1:])

    return jax.tree.map(cut, args)
