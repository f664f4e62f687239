"""What lets the segments of a question see each other: Mamba in one or both directions, and what may take its place.

Every mixer is a stack of pre-norm residual layers x + f(norm x), so that mixers differ in f alone. A sequence holds A
anchors first, in the order they were picked, then G candidates; S = A + G. W is the width of the router.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from molora_jax.adapters import gate_cells
from molora_jax.nn import mamba
from molora_jax.nn.linear import Linear
from molora_jax.nn.norm import RMSNorm, rms_norm
from molora_jax.typing import Array, Bool, Float, Params

Kind = Literal["mamba", "bimamba", "sorted", "gru", "transformer", "mlp"]
KINDS: tuple[Kind, ...] = ("mamba", "bimamba", "sorted", "gru", "transformer", "mlp")
ORDER_FREE: tuple[Kind, ...] = ("sorted", "transformer", "mlp")
"""Mixers whose scores follow the segments however these are ordered; `sorted` unless two first scores are equal."""

EPS = 1e-5
HEADS = 4


class Gru(nnx.Module):
    """Declares GRU layers [layers, 3W, W], uniform in ±1/√W as torch draws them."""

    def __init__(self, width: int, layers: int, *, rngs: nnx.Rngs):
        cells = [gate_cells.init_rnn("gru", rngs.params(), width, width) for _ in range(layers)]
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            setattr(self, name, nnx.Param(jnp.stack([cell[name] for cell in cells])))


class SelfAttention(nnx.Module):
    """Declares layers of multi-head attention."""

    def __init__(self, width: int, layers: int, *, rngs: nnx.Rngs, dtype):
        kw = dict(axes=(None, None), rngs=rngs, stack=(layers,), dtype=dtype, bias=True)
        self.q, self.k, self.v, self.o = (Linear(width, width, **kw) for _ in range(4))


class FeedForward(nnx.Module):
    """Declares layers of one hidden layer of 4 × `d_out` units."""

    def __init__(self, d_in: int, d_out: int, layers: int, *, rngs: nnx.Rngs, dtype):
        kw = dict(axes=(None, None), rngs=rngs, stack=(layers,), dtype=dtype, bias=True)
        self.up, self.down = Linear(d_in, 4 * d_out, **kw), Linear(4 * d_out, d_out, **kw)


class Mixer(nnx.Module):
    """Declares the layers of a mixer of any kind, stacked on axis 0."""

    def __init__(
        self, kind: Kind, width: int, layers: int, *, states: int, taps: int, expand: int, rngs: nnx.Rngs, dtype
    ):
        shell = dict(stack=(layers,), dtype=dtype)
        ssm = dict(expand=expand, states=states, taps=taps, rngs=rngs, **shell)
        self.norm = RMSNorm(width, **shell)
        if kind in ("mamba", "bimamba", "sorted"):
            self.forward = mamba.Mamba(width, **ssm)
        if kind == "bimamba":
            self.backward = mamba.Mamba(width, **ssm)
        if kind == "gru":
            self.gru = Gru(width, layers, rngs=rngs)
        if kind == "transformer":
            self.attention = SelfAttention(width, layers, rngs=rngs, dtype=dtype)
            self.mlp_norm = RMSNorm(width, **shell)
            self.mlp = FeedForward(width, width, layers, rngs=rngs, dtype=dtype)
        if kind == "mlp":
            self.mlp = FeedForward(2 * width, width, layers, rngs=rngs, dtype=dtype)


def mix(
    kind: Kind, params: Params, x: Float[Array, "B S W"], valid: Bool[Array, "B S"], anchors: int
) -> Float[Array, "B S W"]:
    """Runs the layers; what is not valid is passed over as if it were not there, and comes out as anything.

    `mamba`, `sorted` (whose candidates come sorted) and `gru` read from the first to the last. `bimamba` adds a second
    block that reads the anchors first as well, then the candidates from the last to the first. `transformer` has
    HEADS heads, no positions, and GELU layers of 4W. `mlp` sees a segment beside the mean of all (Zaheer et al. 2017,
    eq. 4).
    """

    def step(x, layer):
        return _layer(kind, layer, x, valid, anchors), None

    return jax.lax.scan(step, x, params)[0]


def _layer(kind: Kind, layer: Params, x, valid, anchors: int) -> Float[Array, "B S W"]:
    h = norm(layer["norm"], x)
    if kind == "gru":
        state = gate_cells.new_state("gru", layer["gru"], x.shape[0])
        return x + gate_cells.run("gru", layer["gru"], h, state, valid=valid, reset=None, backend="auto")[0]
    if kind == "transformer":
        x = x + attend(layer["attention"], h, valid)
        return x + feed_forward(layer["mlp"], norm(layer["mlp_norm"], x))
    if kind == "mlp":
        total = jnp.sum(jnp.where(valid[:, :, None], h, 0), axis=1, keepdims=True)
        mean = total / jnp.maximum(jnp.sum(valid, axis=1), 1)[:, None, None]
        return x + feed_forward(layer["mlp"], jnp.concatenate([h, jnp.broadcast_to(mean, h.shape)], axis=-1))
    y = x + mamba.mamba(layer["forward"], h, valid=valid)[0]
    if kind == "bimamba":
        turn = lambda y: jnp.concatenate([y[:, :anchors], y[:, anchors:][:, ::-1]], axis=1)
        y = y + turn(mamba.mamba(layer["backward"], turn(h), valid=turn(valid))[0])
    return y


def norm(params: Params, x: Float[Array, "B S W"]) -> Float[Array, "B S W"]:
    """RMSNorm over W."""
    return rms_norm(x.mT, params["weight"], eps=EPS).mT


def feed_forward(params: Params, x: Float[Array, "B S W"]) -> Float[Array, "B S F"]:
    return mamba.project(params["down"], jax.nn.gelu(mamba.project(params["up"], x), approximate=False))


def attend(params: Params, x: Float[Array, "B S W"], valid: Bool[Array, "B S"]) -> Float[Array, "B S W"]:
    """Multi-head attention of every segment to every valid one (Vaswani et al. 2017, §3.2)."""
    q, k, v = (mamba.project(params[name], x).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(valid[:, None, None], scores, jnp.finfo(scores.dtype).min)
    out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), jnp.where(valid[:, :, None, None], v, 0))
    return mamba.project(params["o"], out.reshape(x.shape))
