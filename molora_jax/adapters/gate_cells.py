"""The recurrences a gate may run: the Mamba-1 block, GRU and LSTM, each from a state to a state.

GRU and LSTM have the names and shapes of torch's layers (`weight_ih` [gates · H, W], …). H is the number of units.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from molora_jax.nn import mamba
from molora_jax.typing import Array, Bool, Float, Params

GATES = {"gru": 3, "lstm": 4}


def init_mamba(key: Array, width: int, *, expand: int, states: int, taps: int) -> Params:
    """The block of `nn.mamba.Mamba`, in fp32 (or wider)."""
    block = mamba.Mamba(width, expand=expand, states=states, taps=taps, rngs=nnx.Rngs(key), dtype=wide())
    return nnx.to_pure_dict(nnx.state(block, nnx.Param))


def init_rnn(kind: str, key: Array, width: int, hidden: int) -> Params:
    """Uniform in ±1/√H, as torch draws them."""
    rows = GATES[kind] * hidden
    shapes = dict(weight_ih=(rows, width), weight_hh=(rows, hidden), bias_ih=(rows,), bias_hh=(rows,))
    keys = jax.random.split(key, len(shapes))
    draw = lambda key, shape: jax.random.uniform(key, shape, wide(), -(hidden**-0.5), hidden**-0.5)
    return {name: draw(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def wide():
    """fp32, or fp64 under x64."""
    return jnp.promote_types(jnp.float32, jax.dtypes.canonicalize_dtype(float))


def width(kind: str, cell: Params) -> int:
    """W, of what the recurrence reads."""
    return (cell["in_proj"]["weight"] if kind == "mamba" else cell["weight_ih"]).shape[-1]


def new_state(kind: str, cell: Params, rows: int):
    """Zeros; leaves are [rows, *stack, ...], where `stack` are the leading axes of the cell's leaves."""
    if kind == "mamba":
        *stack, channels, states = cell["A_log"].shape
        dtype, taps = cell["A_log"].dtype, cell["conv1d"]["weight"].shape[-1]
        conv = jnp.zeros((rows, *stack, taps - 1, channels), dtype)
        return mamba.MambaState(conv=conv, ssm=jnp.zeros((rows, *stack, channels, states), dtype))
    *stack, _, hidden = cell["weight_hh"].shape
    names = ("h", "c") if kind == "lstm" else ("h",)
    return {name: jnp.zeros((rows, *stack, hidden), cell["weight_hh"].dtype) for name in names}


def run(
    kind: str,
    cell: Params,
    u: Float[Array, "B T W"],
    state,
    *,
    valid: Bool[Array, "B T"] | None,
    reset: Bool[Array, "B T"] | None,
    backend: str,
) -> tuple[Float[Array, "B T W"], Params]:
    """(outputs [B T W], or the units [B T H] of GRU and LSTM; state). The masks are those of `nn.mamba.mamba`."""
    if kind == "mamba":
        return mamba.mamba(cell, u, state, valid=valid, reset=reset, backend=backend)
    step = {"gru": gru_step, "lstm": lstm_step}[kind]
    return scan(lambda state, x: step(cell, state, x), state, project(cell, "ih", u), valid, reset)


def project(cell: Params, part: str, x: Float[Array, "*B W"]) -> Float[Array, "*B H"]:
    """The part of all gates that depends on x alone."""
    return jnp.einsum("...w,hw->...h", x, cell[f"weight_{part}"]) + cell[f"bias_{part}"]


def scan(step: Callable, state, x: Float[Array, "B T H"], valid, reset):
    """`step` over the tokens; a single token is no loop."""
    x, valid, reset = (leaf if leaf is None else leaf.swapaxes(0, 1) for leaf in (x, valid, reset))

    def token(old, inputs):
        x, valid, reset = inputs
        if reset is not None:
            old = jax.tree.map(lambda leaf: jnp.where(reset[:, None], 0, leaf), old)
        new = step(old, x)
        if valid is not None:
            new = jax.tree.map(lambda new, old: jnp.where(valid[:, None], new, old), new, old)
        return new, new["h"]

    if len(x) == 1:
        state, y = token(state, jax.tree.map(lambda leaf: leaf[0], (x, valid, reset)))
        return y[:, None], state
    state, y = jax.lax.scan(token, state, (x, valid, reset))
    return y.swapaxes(0, 1), state


def gru_step(cell: Params, state: Params, x: Float[Array, "B H"]) -> Params:
    """One token of a GRU (Cho et al. 2014, eq. 5 to 8, with torch's place for the reset gate: on W_hh h + b_hh).

    r, z = σ(·)    n = tanh(x_n + r (W_n h + b_n))    h ← (1 - z) n + z h
    """
    h = state["h"]
    (xr, xz, xn), (hr, hz, hn) = (jnp.split(part, 3, axis=-1) for part in (x, project(cell, "hh", h)))
    r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
    return {"h": (1 - z) * jnp.tanh(xn + r * hn) + z * h}


def lstm_step(cell: Params, state: Params, x: Float[Array, "B H"]) -> Params:
    """One token of an LSTM (Hochreiter & Schmidhuber 1997, with the forget gate of Gers et al. 2000).

    i, f, o = σ(·)    g = tanh(·)    c ← f c + i g    h ← o tanh(c)
    """
    i, f, g, o = jnp.split(x + project(cell, "hh", state["h"]), 4, axis=-1)
    c = jax.nn.sigmoid(f) * state["c"] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return {"h": jax.nn.sigmoid(o) * jnp.tanh(c), "c": c}
