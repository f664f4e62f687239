"""The Mamba-1 block: depthwise causal convolution, input-dependent discretisation, selective scan, gate.

One function serves whole sequences, prefill in parts, and single tokens. The parameter tree has the names and shapes
of Mamba-1 checkpoints (`in_proj.weight`, `conv1d.weight`, …, `A_log`, `D`). K is the width of the convolution, R the
rank of dt.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from molora_jax.config import UserError
from molora_jax.nn.linear import Linear
from molora_jax.typing import Array, Bool, Float, Int, Params
from pallas_kernels.selective_scan import selective_scan


@functools.partial(jax.tree_util.register_dataclass, data_fields=["conv", "ssm"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class MambaState:
    """What the block remembers of a row, however long: 2.4 KB for 32 channels of 16 states in fp32.

    Attributes:
      conv: [B K-1 C] inputs of the convolution at the last valid tokens, oldest first; zero where there were none.
      ssm: [B C N], fp32 or wider.
    """

    conv: Float[Array, "B K-1 C"]
    ssm: Float[Array, "B C N"]


def new_state(params: Params, rows: int, dtype=jnp.float32) -> MambaState:
    """The state before the first token, for inputs of `dtype`."""
    channels, _, taps = params["conv1d"]["weight"].shape
    wide = jnp.promote_types(dtype, jnp.float32)
    ssm = jnp.zeros((rows, channels, params["A_log"].shape[1]), wide)
    return MambaState(conv=jnp.zeros((rows, taps - 1, channels), dtype), ssm=ssm)


def mamba(
    params: Params,
    x: Float[Array, "B T D"],
    state: MambaState | None = None,
    *,
    valid: Bool[Array, "B T"] | None = None,
    reset: Bool[Array, "B T"] | None = None,
    backend: str = "auto",
) -> tuple[Float[Array, "B T D"], MambaState]:
    """The block without norm and residual (Gu & Dao 2023, §3.4), from a state to a state: (out [B T D], state).

        [u, z] = W_in x        u ← silu(conv(u))        [r, B, C] = W_x u        dt = softplus(W_dt r + b_dt)
        out = W_out (scan(u, dt, -exp(A_log), B, C) + D u) · silu(z)

    However a sequence is cut into calls, down to single tokens, and wherever pads lie, the real tokens and the last
    state are the same up to rounding.

    Args:
      params: the tree that `Mamba` declares; projections with a bias are taken too.
      x: [B T D].
      state: of the tokens before; None at the start.
      valid: false at pads, which are passed over as if they were not there; their output is zero (the bias of W_out,
        if there is one).
      reset: true at the first token of a segment in packed rows; it sees nothing before it.
      backend: of `pallas_kernels.selective_scan`.

    Raises:
      UserError: x has another width than the block.
    """
    width = params["in_proj"]["weight"].shape[1]
    if x.ndim != 3 or x.shape[2] != width:
        raise UserError(f"mamba: got x {list(x.shape)}, expected [B T {width}], the input width of in_proj.weight")
    state = new_state(params, len(x), x.dtype) if state is None else state
    rows = align(valid, reset)
    u, z = jnp.split(project(params["in_proj"], rows.pack(x)).astype(x.dtype), 2, axis=-1)
    u, conv = causal_conv(params["conv1d"], u, state.conv, rows)
    u = jax.nn.silu(u).astype(x.dtype)
    dt, Bm, Cm = selection(params, u)
    A = -jnp.exp(params["A_log"].astype(dt.dtype))
    masks = dict(valid=rows.valid, reset=rows.reset)
    with jax.named_scope("selective_scan"):
        y, ssm = selective_scan(u, dt, A, Bm, Cm, params["D"], z, h0=state.ssm, **masks, backend=backend)
    return rows.unpack(project(params["out_proj"], y).astype(x.dtype)), MambaState(conv, ssm)


def project(layer: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
    """W x + b, in fp32 or wider; the weight on the left, as `nn.linear.linear` has it and why."""
    acc = jnp.promote_types(x.dtype, jnp.float32)
    y = jnp.moveaxis(jnp.einsum("fd,btd->fbt", layer["weight"], x, preferred_element_type=acc), 0, -1)
    return y + layer["bias"].astype(acc) if "bias" in layer else y


def selection(params: Params, u: Float[Array, "B T C"]) -> tuple[Array, Array, Array]:
    """The step sizes, input and output projections of each token: dt [B T C], B and C [B T N], in fp32 or wider."""
    rank, states = params["dt_proj"]["weight"].shape[1], params["A_log"].shape[1]
    low, Bm, Cm = jnp.split(project(params["x_proj"], u), [rank, rank + states], axis=-1)
    return jax.nn.softplus(project(params["dt_proj"], low)), Bm, Cm


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows whose valid tokens come first, as every recurrence wants them.

    Attributes:
      order: the token at each place; None where all are valid and nothing moves.
      place: the place of each token, the inverse of `order`.
      lengths: valid tokens of each row; None where all are.
      valid: of each place.
      segments: number of resets up to each place; after the last valid token, of the whole row. None without resets.
    """

    order: Int[Array, "B T"] | None = None
    place: Int[Array, "B T"] | None = None
    lengths: Int[Array, "B"] | None = None
    valid: Bool[Array, "B T"] | None = None
    segments: Int[Array, "B T"] | None = None

    @property
    def reset(self) -> Bool[Array, "B T"] | None:
        """True where a segment begins."""
        if self.segments is None:
            return None
        return jnp.diff(self.segments, axis=1, prepend=0) > 0

    def pack(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return x if self.order is None else permute(x, self.order, self.place)

    def unpack(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return x if self.order is None else permute(x, self.place, self.order)


def align(valid: Bool[Array, "B T"] | None, reset: Bool[Array, "B T"] | None) -> Rows:
    """Moves the valid tokens of each row to its front, in their order.

    Example: valid 0 1 0 1 and reset 0 0 1 0 give order 1 3 0 2, place 2 0 3 1, segments 0 1 1 1.
    """
    segments = None if reset is None else jnp.cumsum(reset, axis=1, dtype=jnp.int32)
    if valid is None:
        return Rows(segments=segments)
    lengths = jnp.sum(valid, axis=1, dtype=jnp.int32)
    nth = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
    tokens = jnp.arange(valid.shape[1], dtype=jnp.int32)
    place = jnp.where(valid, nth, lengths[:, None] + tokens - nth - 1)
    order = jnp.argsort(place, axis=1)
    front = tokens < lengths[:, None]
    if segments is not None:
        segments = jnp.where(front, jnp.take_along_axis(segments, order, axis=1), segments[:, -1:])
    return Rows(order, place, lengths, front, segments)


@jax.custom_vjp
def permute(x, order, place):
    """x [B T D] with token order[b, t] at t. Its gradient is a gather by `place`, where jax would make a scatter."""
    del place
    return jnp.take_along_axis(x, order[:, :, None], axis=1)


permute.defvjp(
    lambda x, order, place: (permute(x, order, place), (order, place)),
    lambda inverse, g: (permute(g, inverse[1], inverse[0]), None, None),
)


def causal_conv(
    layer: Params, x: Float[Array, "B T C"], history: Float[Array, "B K-1 C"], rows: Rows
) -> tuple[Float[Array, "B T C"], Float[Array, "B K-1 C"]]:
    """y_t = b + Σ_k w_k x_{t-K+1+k} per channel, over the tokens of t's own segment: (y in fp32 or wider, history).

    The history is what precedes the first token, and, returned, the last K-1 valid tokens of the last segment.
    """
    taps, length = layer["weight"].shape[2], x.shape[1]
    acc = jnp.promote_types(x.dtype, jnp.float32)
    window = jnp.concatenate([history.astype(x.dtype), x], axis=1)
    segments = rows.segments if rows.segments is None else jnp.pad(rows.segments, ((0, 0), (taps - 1, 0)))
    weight = layer["weight"][:, 0].astype(acc)
    y = 0.0
    for k in range(taps):
        tap = window[:, k : k + length].astype(acc)
        if segments is not None:
            tap = jnp.where((segments[:, k : k + length] == rows.segments)[:, :, None], tap, 0)
        y = y + weight[:, k] * tap
    if "bias" in layer:
        y = y + layer["bias"].astype(acc)

    def tail(row):
        if rows.lengths is None:
            return row[:, length:]
        return jax.vmap(lambda r, start: jax.lax.dynamic_slice_in_dim(r, start, taps - 1))(row, rows.lengths)

    last = tail(window)
    if segments is not None:
        last = jnp.where((tail(segments) == segments[:, -1:])[:, :, None], last, 0)
    return y, last.astype(history.dtype)


class DepthwiseConv(nnx.Module):
    """Declares weight [*stack, C, 1, K] and bias [*stack, C], uniform in ±1/√K as torch initialises them."""

    def __init__(self, channels: int, taps: int, *, rngs: nnx.Rngs, stack=(), dtype):
        lead, bound = ("layers",) * len(stack), taps**-0.5
        draw = lambda *shape: jax.random.uniform(rngs.params(), (*stack, *shape), dtype, -bound, bound)
        self.weight = nnx.Param(draw(channels, 1, taps), axes=(*lead, "channels", None, None))
        self.bias = nnx.Param(draw(channels), axes=(*lead, "channels"))


class Mamba(nnx.Module):
    """Declares the block; `stack` copies of it lie on leading axes. Unstacked it can be called: `block(x)`.

    At the start A = -(1 … N) in every channel, D = 1, and dt is log-uniform in [1e-3, 1e-1] (Gu & Dao 2023, §3.6).
    """

    def __init__(
        self, width: int, *, expand=2, states=16, taps=4, dt_rank: int | None = None, rngs: nnx.Rngs, stack=(), dtype
    ):
        channels, rank = expand * width, dt_rank or math.ceil(width / 16)
        lead, wide = ("layers",) * len(stack), jnp.promote_types(dtype, jnp.float32)
        kw = dict(rngs=rngs, stack=stack, dtype=dtype)
        self.in_proj = Linear(width, 2 * channels, axes=("channels", "embed"), **kw)
        self.conv1d = DepthwiseConv(channels, taps, **kw)
        self.x_proj = Linear(channels, rank + 2 * states, axes=(None, "channels"), **kw)
        self.dt_proj = Linear(rank, channels, axes=("channels", None), bias=True, **kw)
        self.dt_proj.weight[...] = jax.random.uniform(
            rngs.params(), self.dt_proj.weight.shape, dtype, -(rank**-0.5), rank**-0.5
        )
        dt = jnp.exp(jax.random.uniform(rngs.params(), (*stack, channels), wide, math.log(1e-3), math.log(1e-1)))
        self.dt_proj.bias[...] = (dt + jnp.log(-jnp.expm1(-dt))).astype(dtype)  # softplus of it is dt
        A_log = jnp.broadcast_to(jnp.log(jnp.arange(1, states + 1, dtype=wide)), (*stack, channels, states))
        self.A_log = nnx.Param(A_log, axes=(*lead, "channels", None))
        self.D = nnx.Param(jnp.ones((*stack, channels), wide), axes=(*lead, "channels"))
        self.out_proj = Linear(channels, width, axes=("embed", "channels"), **kw)

    def __call__(self, x: Float[Array, "B T D"], state: MambaState | None = None, *, valid=None, reset=None):
        return mamba(nnx.to_pure_dict(nnx.state(self, nnx.Param)), x, state, valid=valid, reset=reset)
