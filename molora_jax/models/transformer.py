"""The decoder that every supported family is a configuration of: its declaration, and `apply`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from molora_jax.adapters import bank as banks
from molora_jax.adapters.bank import Bank, LayerExperts
from molora_jax.adapters.route import Choice, Route
from molora_jax.config import ModelConfig, UserError
from molora_jax.models.state import DecodeState
from molora_jax.nn import attention, mlp, rope
from molora_jax.nn.layout import Dense, Layout, dense
from molora_jax.nn.linear import Linear, linear
from molora_jax.nn.norm import RMSNorm, rms_norm
from molora_jax.typing import Array, Float, Int, Params

TAPS = ("hidden", "gates", "queries", "keys")
"""What `apply` can return besides its output."""


class Attention(nnx.Module):
    """Declares the projections of L attention blocks, stacked."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs, dtype):
        q, kv, stack = cfg.heads * cfg.head_width, cfg.kv_width, (cfg.layers,)
        kw = dict(rngs=rngs, stack=stack, dtype=dtype)
        self.q_proj = Linear(cfg.width, q, axes=("heads", "embed"), bias=cfg.qkv_bias, **kw)
        self.k_proj = Linear(cfg.width, kv, axes=("kv_heads", "embed"), bias=cfg.qkv_bias, **kw)
        self.v_proj = Linear(cfg.width, kv, axes=("kv_heads", "embed"), bias=cfg.qkv_bias, **kw)
        self.o_proj = Linear(q, cfg.width, axes=("embed", "heads"), bias=cfg.o_bias, **kw)
        if cfg.qk_norm:
            norm = dict(offset=cfg.norm_offset, stack=stack, dtype=dtype)
            self.q_norm = RMSNorm(cfg.head_width, **norm)
            self.k_norm = RMSNorm(cfg.head_width, **norm)


class MLP(nnx.Module):
    """Declares the projections of L gated feed-forward blocks, stacked."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs, dtype):
        kw = dict(rngs=rngs, stack=(cfg.layers,), dtype=dtype, bias=cfg.mlp_bias)
        self.gate_proj = Linear(cfg.width, cfg.mlp_width, axes=("mlp", "embed"), **kw)
        self.up_proj = Linear(cfg.width, cfg.mlp_width, axes=("mlp", "embed"), **kw)
        self.down_proj = Linear(cfg.mlp_width, cfg.width, axes=("embed", "mlp"), **kw)


class Layers(nnx.Module):
    """Declares L pre-norm blocks, every leaf with a leading layer axis."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs, dtype):
        norm = dict(offset=cfg.norm_offset, stack=(cfg.layers,), dtype=dtype)
        self.attn_norm = RMSNorm(cfg.width, **norm)
        self.attn = Attention(cfg, rngs=rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(cfg.width, **norm)
        self.mlp = MLP(cfg, rngs=rngs, dtype=dtype)
        if cfg.post_norms:
            self.attn_post_norm = RMSNorm(cfg.width, **norm)
            self.mlp_post_norm = RMSNorm(cfg.width, **norm)


class Transformer(nnx.Module):
    """Declares a decoder: names, shapes, initial values and logical sharding axes of all its parameters."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        self.cfg = cfg
        self.embed = Linear(cfg.width, cfg.vocab, axes=("vocab", "embed"), rngs=rngs, dtype=dtype)
        self.layers = Layers(cfg, rngs=rngs, dtype=dtype)
        self.norm = RMSNorm(cfg.width, offset=cfg.norm_offset, dtype=dtype)
        if not cfg.tied:
            self.head = Linear(cfg.width, cfg.vocab, axes=("vocab", "embed"), rngs=rngs, dtype=dtype)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Logits of whole rows, for a notebook; programs use `split` and `apply`."""
        _, params = split(self)
        out = apply(self.cfg, params, tokens.reshape(-1), dense(*tokens.shape))
        return logits(self.cfg, params, out.hidden).reshape(*tokens.shape, -1)


def split(model: nnx.Module) -> tuple[nnx.GraphDef, Params]:
    """Takes a module apart: its graph, and its parameters as a nested dict of arrays with string keys."""
    graphdef, state = nnx.split(model, nnx.Param)
    return graphdef, nnx.to_pure_dict(state)


def init(cfg: ModelConfig, seed: int = 0, dtype=jnp.float32) -> Params:
    """Random parameters: normal with variance 1/fan-in, norms at identity, biases zero."""
    return split(Transformer(cfg, rngs=nnx.Rngs(seed), dtype=dtype))[1]


def abstract(cfg: ModelConfig, dtype=jnp.float32) -> Params:
    """The tree that `init` makes, with `jax.ShapeDtypeStruct` leaves: what a loader fills."""
    return nnx.to_pure_dict(
        nnx.split(nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0), dtype=dtype)), nnx.Param)[1]
    )


def unstack(params: Params) -> Params:
    """The same parameters with `layers` as a list, one dict a layer, for `apply` to unroll.

    On a CPU an unrolled decode step is 1.4 to 2 × faster than a scanned one, which copies every layer's weights out of
    the stack; it must be done once, outside any jit. The stacked arrays are freed as their slices are made.
    """
    leaves, tree = jax.tree.flatten(params.pop("layers"))
    slices = [list(leaves.pop(0)) for _ in range(len(leaves))]
    return params | {"layers": [tree.unflatten(layer) for layer in zip(*slices, strict=True)]}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """What `apply` returns.

    Attributes:
      hidden: [N, D]; after the final norm, or the residual stream when only the first layers ran.
      state: the decode state with the tokens' keys and values written, or None as it came.
      taps: what was asked for by name; "gates" is a table by site.
      trace: the experts' choices by decision, each with a leading layer axis; as the choices of a `Route`, it replays.
    """

    hidden: Float[Array, "N D"]
    state: DecodeState | None
    taps: dict[str, Array | dict[str, Array]]
    trace: dict[str, Choice]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Place:
    """What tells one layer from another, besides its weights."""

    kind: Int[Array, ""]  # page table it uses
    base: Int[Array, ""]  # first row of its share of the KV table
    window: Int[Array, ""]
    rotation: Int[Array, ""]  # rotary embedding it uses


def _places(cfg: ModelConfig, state: DecodeState | None) -> list[_Place]:
    bases = state.bases(cfg) if state is not None else (0,) * cfg.layers
    rotations = [int(window > 0 and cfg.local_rope is not None) for window in cfg.windows]
    columns = np.array([cfg.kind_of_layer, bases, cfg.windows, rotations], np.int32)
    return [_Place(*column) for column in columns.T]


def apply(
    cfg: ModelConfig,
    params: Params,
    tokens: Int[Array, "N"],
    layout: Layout,
    state: DecodeState | None = None,
    *,
    bank: Bank | None = None,
    route: Route | None = None,
    layers: int | None = None,
    taps: tuple[str, ...] = (),
    remat: bool = False,
) -> Output:
    """Runs the decoder over a flat list of tokens; pure.

    Args:
      params: as `init` makes them (layers stacked and scanned) or as `unstack` does (unrolled).
      layout: `Dense` attends within the rectangle and takes no state; `Ragged` writes to and reads from `state`.
      bank: experts, their layers stacked or unrolled as those of `params`.
      route: who uses which of them; given with a bank.
      layers: run only the first so many, without the final norm.
      taps: of `TAPS`. `"hidden"` returns the residual stream after every layer, [layers, N, D]; `"gates"` the λ of
        each token under every expert, by site, [layers, N, E] or [layers, N, E, R]: none where no expert has gates;
        `"queries"` and `"keys"` what every layer's attention compares, [layers, H, d, N] and [layers, K, d, N].
      remat: a backward pass keeps only the residual stream between layers, and computes the inside of each once more.

    Raises:
      UserError: a bank without a route, or an unknown tap.
    """
    if (bank is None) != (route is None):
        raise UserError("apply: got a bank or a route alone, expected both or neither")
    if unknown := set(taps) - set(TAPS):
        raise UserError(f"apply: got the tap {min(unknown)!r}, expected one of {', '.join(TAPS)}")
    x = params["embed"]["weight"][tokens]
    if bank is not None:
        x = banks.embed(bank, route.ids, tokens, x)
    x = x.T * jnp.asarray(cfg.embed_scale, x.dtype)
    places = _places(cfg, state)[:layers]
    block = functools.partial(_block, cfg, layout, _rotations(cfg, layout, x.dtype))
    run = _unrolled if isinstance(params["layers"], list) else _scanned
    if remat:
        block = jax.checkpoint(block, prevent_cse=run is _unrolled)  # the body of a scan has no CSE across its layers
    x, state, (kept, trace) = run(block, params["layers"], bank, route, places, x, state, taps)
    if layers is None:
        x = rms_norm(x, params["norm"]["weight"], eps=cfg.norm_eps, offset=cfg.norm_offset)
    return Output(x.T, state, kept, trace)


def _tapped(taps: tuple[str, ...], x: Float[Array, "D N"], seen: dict[str, Any]) -> dict[str, Any]:
    """What is kept of one layer."""
    return {name: x.T if name == "hidden" else seen[name] for name in taps}


def _unrolled(block, layers, bank, route, places, x, state, taps):
    if bank is not None and bank.stacked:
        raise UserError("apply: got a stacked bank for unrolled layers, expected one made for these parameters")
    kept = []
    for i, place in enumerate(places):
        experts = None if bank is None else (bank.at(i), route.at(i), bank.gates)
        x, own, trace, seen = block((layers[i], experts), place, x, state and state.at(i))
        state = state and state.put(i, own)
        kept.append((_tapped(taps, x, seen), trace))
    return x, state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *kept)


def _scanned(block, layers, bank, route, places, x, state, taps):
    if bank is not None and not bank.stacked:
        raise UserError("apply: got an unrolled bank for stacked layers, expected one made for these parameters")
    depth = len(places)

    def step(carry, layer):
        (x, state), (weights, sites, place, i) = carry, layer
        experts = None if bank is None else (sites, route.at(i), bank.gates)
        x, own, trace, seen = block((weights, experts), place, x, state and state.at(i))
        return (x, state and state.put(i, own)), (_tapped(taps, x, seen), trace)

    first = lambda tree: jax.tree.map(lambda leaf: leaf[:depth], tree)
    sites = None if bank is None else first(bank.layers)
    places = jax.tree.map(lambda *v: np.stack(v), *places)
    (x, state), kept = jax.lax.scan(step, (x, state), (first(layers), sites, places, np.arange(depth)))
    return x, state, kept


def logits(
    cfg: ModelConfig,
    params: Params,
    hidden: Float[Array, "N D"],
    *,
    bank: Bank | None = None,
    ids: Int[Array, "N"] | None = None,
) -> Float[Array, "N V"]:
    """Next-token scores in fp32 (or wider), for the rows that need them; `ids` are their experts in `bank`."""
    weights = params["embed"] if cfg.tied else params["head"]
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    scores = linear(hidden.T, weights["weight"], out_dtype=wide)
    return (scores if bank is None else banks.head(bank, ids, hidden.T, scores)).T


def _rotations(cfg: ModelConfig, layout: Layout, dtype) -> tuple[Array, Array]:
    """cos and sin of the tokens' angles under each of the model's rotary embeddings: [ropes, d/2, N]."""
    ropes = [cfg.rope] if cfg.local_rope is None else [cfg.rope, cfg.local_rope]
    freqs = jnp.stack([jnp.asarray(rope.frequencies(r, cfg.head_width)) for r in ropes])
    wide = jnp.promote_types(dtype, jnp.float32)
    return jax.vmap(lambda freq: rope.rotation(freq, layout.token_positions, wide))(freqs)


@functools.partial(jax.jit, static_argnums=0)
def _block(cfg, layout, rotations, layer, place, x, state):
    """One pre-norm layer on the residual stream x: [D, N]. A jit of its own: unrolled layers are traced once."""
    weights, experts = layer
    remembered = _recall(state, layout)
    experts = experts and LayerExperts(*experts, layout, remembered)
    norm = functools.partial(rms_norm, eps=cfg.norm_eps, offset=cfg.norm_offset)
    out, state, compared = _attention(
        cfg, layout, rotations, weights["attn"], experts, place, norm(x, weights["attn_norm"]["weight"]), state
    )
    x = x + (norm(out, weights["attn_post_norm"]["weight"]) if cfg.post_norms else out)
    out = _mlp(cfg, weights["mlp"], experts, norm(x, weights["mlp_norm"]["weight"]))
    x = x + (norm(out, weights["mlp_post_norm"]["weight"]) if cfg.post_norms else out)
    if remembered:
        state = _remember(state, layout, experts.memory)
    return x, state, experts.trace if experts else {}, {"gates": experts.scales if experts else {}} | compared


def _recall(state: DecodeState | None, layout: Layout) -> dict[str, Params]:
    """What the gates of this layer remember of the layout's rows."""
    gates = {} if state is None else state.gates
    read = lambda leaf: leaf.at[layout.slots].get(mode="fill", fill_value=0)
    return jax.tree.map(read, gates)


def _remember(state: DecodeState, layout: Layout, memory: dict[str, Params]) -> DecodeState:
    write = lambda leaf, rows: leaf.at[layout.slots].set(rows, mode="drop")
    return dataclasses.replace(state, gates=jax.tree.map(write, state.gates, memory))


@jax.named_scope("attention")
def _attention(cfg, layout, rotations, weights, experts, place, x, state):
    project = _projector("attn", weights, experts, x)
    heads = lambda y: y.reshape(-1, cfg.head_width, y.shape[-1])
    q, k, v = (heads(project(name, x)) for name in ("q_proj", "k_proj", "v_proj"))
    if cfg.qk_norm:
        q = rms_norm(q, weights["q_norm"]["weight"], eps=cfg.norm_eps, offset=cfg.norm_offset)
        k = rms_norm(k, weights["k_norm"]["weight"], eps=cfg.norm_eps, offset=cfg.norm_offset)
    cos, sin = (table[place.rotation] for table in rotations)
    q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
    how = dict(window=place.window, scale=cfg.attn_scale)
    if isinstance(layout, Dense):
        out = attention.dense_attention(q, k, v, layout, **how, windows=cfg.windows)
    else:
        at = dict(kind=place.kind, base=place.base)
        state = dataclasses.replace(state, kv=attention.write_kv(state.kv, k, v, layout, **at))
        out = attention.paged_attention(q, state.kv, layout, **at, **how)
    return project("o_proj", out.reshape(-1, out.shape[-1])), state, {"queries": q, "keys": k}


@jax.named_scope("mlp")
def _mlp(cfg, weights, experts, x):
    project = _projector("mlp", weights, experts, x)
    return project("down_proj", mlp.gate(project("gate_proj", x), project("up_proj", x), cfg.activation))


def _projector(block: str, weights: Params, experts: LayerExperts | None, x: Float[Array, "D N"]):
    """W x + b of the block's projections by name, with their experts; x is the block's input."""
    if experts is not None:
        experts.see(block, x)

    def project(name: str, x: Float[Array, "D N"]) -> Float[Array, "F N"]:
        weight, bias = weights[name]["weight"], weights[name].get("bias")
        if experts is None:
            return linear(x, weight, bias)
        y = experts.project(block, name, linear(x, weight), x)
        return y if bias is None else y + bias[:, None]

    return project
