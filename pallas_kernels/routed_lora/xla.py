"""The op in plain XLA, for every platform; how it is computed is chosen by static shape from measured tables."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import common
from pallas_kernels.routed_lora import reference, schedule
from pallas_kernels.routed_lora.layout import Banks, operand, product, sums

PACKAGE = "pallas_kernels.routed_lora"
GATHER_LIMIT = 2**22  # gathered bank elements: 16 MB in fp32
CROWD_LIMIT = 2**14  # elements of the rank space up to which the packed form stands in for a full expert
PACKED_LIMIT = 2**25  # elements of the rank space [N E R] of all experts: 128 MB in fp32


def hard(x, pair: Banks, ids, mult, *, with_rank: bool = False, method: tuple[str, int] | None = None):
    """`reference.hard` by the method measured fastest for these shapes; `method` forces (name, tile)."""
    name, tile = method or choose(len(x), pair)
    y, u = METHODS[name](x, pair, ids, mult, tile)
    none = ((ids < 0) | (ids >= pair.experts))[:, None]
    return jnp.where(none, 0, y), jnp.where(none, 0, u) if with_rank else None


def choose(n: int, pair: Banks) -> tuple[str, int]:
    """(method, tile) for static shapes: the nearest measurement on this kind of device, else a heuristic."""
    e, r = pair.experts, pair.rank
    if e == 1:
        return "packed", 0
    if common.target()[0] == "cpu" and n >= max(2 * e, 8):
        # In a whole model the banks come from memory, which `tune`, one call after another, finds in the cache:
        # there this takes 0.8 × the time of the loop (8 experts, 32 tokens) to 0.85 × (16 experts, 512 tokens).
        return "capacity", common.round_up(2 * n // e if n < 16 * e else 3 * n // (2 * e), 4)
    gathered = n * r * (pair.width_in + pair.width_out)
    fits = {"gather": gathered <= GATHER_LIMIT, "packed": n * e * r <= PACKED_LIMIT}
    row = measured(n, pair)
    if row is not None and fits.get(row["method"], True):
        return row["method"], row["tile"]
    tile = 1 << max(n // e - 1, 1).bit_length()
    if common.target()[0] == "cpu":
        return ("rows", 1) if n <= 16 else ("loop", min(max(tile, 8), 64))
    if e * r <= 512 and fits["packed"]:
        return "packed", 0
    return ("gather", 0) if fits["gather"] else ("tiles", min(max(tile, 16), 64))


def measured(n: int, pair: Banks) -> dict | None:
    """What `tune` chose nearest to these shapes on this kind of device: method, tile, and backend where it had two."""
    dims = dict(N=n, E=pair.experts, R=pair.rank, D=pair.width_in, F=pair.width_out)
    return common.tuned(PACKAGE, "choices", reach=8, **dims)


def gather(x, pair: Banks, ids, mult, _tile):
    return reference.hard(x, pair, ids, mult, with_rank=True)


def packed(x, pair: Banks, ids, mult, _tile):
    """Two dense products with all experts side by side along the rank; the ranks of other experts are masked.

    A masked rank still meets the other expert's `up` row, and 0 · nan is nan: non-finite entries of `up` are zeroed
    for everyone, and the tokens of an expert that has any are set to nan.
    """
    e = pair.experts
    if e == 1:
        return alone(x, pair, ids, mult)
    all_u = product(f"nd,{pair.down_axes}->ner", x, pair.down, sums(x, pair))
    mine = (ids[:, None] == jnp.arange(e))[:, :, None]
    u = jnp.sum(jnp.where(mine, all_u, 0), axis=1)
    h = jnp.where(mine, (u * mult.reshape(len(x), -1))[:, None], 0)
    h = h.astype(operand(x, pair.up))
    finite = jnp.isfinite(pair.up)
    y = product(f"ner,{pair.up_axes}->nf", h, jnp.where(finite, pair.up, 0), sums(x, pair))
    poisoned = jnp.any(mine[:, :, 0] & ~jnp.all(finite, axis=(1, 2)), axis=1)
    return jnp.where(poisoned[:, None], jnp.nan, y), u


def alone(x, pair: Banks, ids, mult):
    """`packed` of one expert, as columns: for a CPU the products with a bank on the left are the fast ones."""
    mine = (ids == 0)[None]
    down, up = pair.down[0], pair.up[0]
    d, f = pair.down_axes[1:], pair.up_axes[1:]
    u = jnp.where(mine, product(f"{d},dn->rn", down, x.T, sums(x, pair)), 0)
    h = jnp.where(mine, u * mult.reshape(len(x), -1).T, 0).astype(operand(x, pair.up))
    return product(f"{f},rn->fn", up, h, sums(x, pair)).T, u.T


def loop(x, pair: Banks, ids, mult, tile: int):
    """A loop over the tiles in use; sorted rows past an expert's last are overwritten by the experts after it.

    The fastest on a CPU: nothing of the banks is copied, and no product is wider than one expert.
    """
    n, plan = len(x), schedule.sort(ids, pair.experts, tile)
    pad = lambda v: jnp.pad(v[plan.order], ((0, tile), (0, 0)))
    xs, ms = pad(x), pad(mult.reshape(n, -1))
    d, f = pair.down_axes[1:], pair.up_axes[1:]

    def body(t, carry):
        y, us = carry
        e, start = plan.expert[t], plan.start[t]
        u = product(f"nd,{d}->nr", schedule.take(xs, start, tile), expert_of(pair.down, e), us.dtype)
        h = (u * schedule.take(ms, start, tile)).astype(operand(x, pair.up))
        out = product(f"nr,{f}->nf", h, expert_of(pair.up, e), y.dtype)
        return lax.dynamic_update_slice_in_dim(y, out, start, 0), lax.dynamic_update_slice_in_dim(us, u, start, 0)

    acc = sums(x, pair)
    empty = jnp.zeros((n + tile, pair.width_out), acc), jnp.zeros((n + tile, pair.rank), acc)
    y, us = lax.fori_loop(0, plan.count, body, empty)
    return y[plan.row], us[plan.row]


def rows(x, pair: Banks, ids, mult, _tile):
    """A loop over the tokens, unsorted: the fastest on a CPU for a handful of them."""
    n, mult = len(x), mult.reshape(len(x), -1)
    d, f = pair.down_axes[1:], pair.up_axes[1:]

    def body(t, carry):
        y, us = carry
        e = jnp.clip(ids[t], 0, pair.experts - 1)
        u = product(f"d,{d}->r", x[t], expert_of(pair.down, e), us.dtype)
        h = (u * mult[t]).astype(operand(x, pair.up))
        out = product(f"r,{f}->f", h, expert_of(pair.up, e), y.dtype)
        return y.at[t].set(out), us.at[t].set(u)

    acc = sums(x, pair)
    return lax.fori_loop(0, n, body, (jnp.zeros((n, pair.width_out), acc), jnp.zeros((n, pair.rank), acc)))


def tiles(x, pair: Banks, ids, mult, tile: int):
    """All tiles at once, each with a copy of its expert: for devices where a loop would leave most units idle."""
    n, plan = len(x), schedule.sort(ids, pair.experts, tile)
    d, f = pair.down_axes[1:], pair.up_axes[1:]
    u = product(f"tnd,t{d}->tnr", schedule.padded(plan, x, tile), pair.down[plan.expert], sums(x, pair))
    h = (u * schedule.padded(plan, mult.reshape(n, -1), tile)).astype(operand(x, pair.up))
    y = product(f"tnr,t{f}->tnf", h, pair.up[plan.expert], u.dtype)
    return y.reshape(-1, pair.width_out)[plan.slot], u.reshape(-1, pair.rank)[plan.slot]


def capacity(x, pair: Banks, ids, mult, room: int):
    """Two batched products with `room` tokens for each expert, or another method when one expert has more.

    Both cores of a CPU read the banks where they lie. What leaves the branch is materialised, so that neither the
    gather of rows nor a transposition outside is fused into the other's element-wise, slow form.
    """
    n, e = len(x), pair.experts
    mine = ids[:, None] == jnp.arange(e)
    place = jnp.sum(jnp.where(mine, jnp.cumsum(mine, axis=0) - 1, 0), axis=1)
    slot = jnp.where((ids < 0) | (ids >= e), e * room, ids * room + place)
    token = jnp.full((e * room,), n, jnp.int32).at[slot].set(jnp.arange(n, dtype=jnp.int32), mode="drop")
    laid = lambda v: v.at[token].get(mode="clip").reshape(e, room, -1)  # places left over are never read

    def roomy(x):
        u = product(f"ecd,{pair.down_axes}->ecr", laid(x), pair.down, sums(x, pair))
        h = (u * laid(mult.reshape(n, -1))).astype(operand(x, pair.up))
        y = product(f"ecr,{pair.up_axes}->ecf", h, pair.up, sums(x, pair))
        flat = lambda v: v.reshape(e * room, -1).at[slot].get(mode="clip")
        return flat(y), flat(u)

    if room >= n:
        return roomy(x)
    crowded = packed if n * e * pair.rank <= CROWD_LIMIT else loop
    tile = min(max(room, 8), 64)
    return lax.cond(jnp.all(place < room), roomy, lambda x: crowded(x, pair, ids, mult, tile), x)


METHODS = {"capacity": capacity, "gather": gather, "packed": packed, "rows": rows, "loop": loop, "tiles": tiles}


def expert_of(bank, e):
    return lax.dynamic_index_in_dim(bank, e, keepdims=False)
