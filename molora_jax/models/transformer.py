"""The decoder that every supported family is a configuration of: its declaration, and `apply`."""

import jax
import jax.numpy as jnp
from flax import nnx

from molora_jax.config import ModelConfig
from molora_jax.nn.linear import Linear
from molora_jax.nn.norm import RMSNorm
from molora_jax.typing import Params


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
            norm = dict(eps=cfg.norm_eps, offset=cfg.norm_offset, stack=stack, dtype=dtype)
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
        norm = dict(eps=cfg.norm_eps, offset=cfg.norm_offset, stack=(cfg.layers,), dtype=dtype)
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
        self.norm = RMSNorm(cfg.width, eps=cfg.norm_eps, offset=cfg.norm_offset, dtype=dtype)
        if not cfg.tied:
            self.head = Linear(cfg.width, cfg.vocab, axes=("vocab", "embed"), rngs=rngs, dtype=dtype)


def split(model: nnx.Module) -> tuple[nnx.GraphDef, Params]:
    """Takes a module apart: its graph, and its parameters as a nested dict of arrays with string keys."""
    graphdef, state = nnx.split(model, nnx.Param)
    return graphdef, nnx.to_pure_dict(state)


def init(cfg: ModelConfig, seed: int = 0, dtype=jnp.float32) -> Params:
    """Random parameters: normal with variance 1/fan-in, norms at identity, biases zero."""
    return split(Transformer(cfg, rngs=nnx.Rngs(seed), dtype=dtype))[1]


def abstract(cfg: ModelConfig, dtype=jnp.float32) -> Params:
    """The tree that `init` makes, with `jax.ShapeDtypeStruct` leaves: what a loader fills."""
    return nnx.to_pure_dict(nnx.split(nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0), dtype=dtype)), nnx.Param)[1])
