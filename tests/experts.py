"""Non-zero random adapters of every kind for the tiny models."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from molora_jax.adapters import lora
from molora_jax.adapters.adapter import Adapter, LoRAWeights
from molora_jax.adapters.fresh import ALL_LINEAR, fresh
from molora_jax.config import ModelConfig
from molora_jax.typing import Params

KINDS = ("plain", "rslora", "dora", "bias", "ends", "whole")


def adapter(cfg: ModelConfig, params: Params, kind: str, seed: int = 0, name: str | None = None) -> Adapter:
    """An adapter of one of `KINDS` for a stacked model; its factors are wide enough to change tokens."""
    rng = np.random.default_rng(100 + seed)
    make = lambda sites, rank, **kw: fresh(
        cfg, params, name or kind, rank=rank, sites=sites, seed=seed, spread=0.3, **kw
    )
    if kind == "plain":
        return make(ALL_LINEAR, 3)
    if kind == "rslora":
        return skip_first_layer(make(("attn.q_proj", "attn.o_proj"), 5, rslora=True, alpha=4))
    if kind == "dora":
        return edit(make(("mlp.down_proj", "attn.v_proj"), 2), lambda path, i, w: decomposed(params, path, i, w, rng))
    if kind == "bias":
        return edit(
            make(("attn.k_proj", "mlp.up_proj"), 1),
            lambda path, i, w: dataclasses.replace(w, bias=rng.standard_normal(w.b.shape[0]).astype(np.float32)),
        )
    if kind == "ends":
        return make(("embed", "head", "attn.v_proj"), 2)
    whole = np.asarray(params["embed"]["weight"]) + rng.standard_normal((cfg.vocab, cfg.width)).astype(np.float32) * 0.3
    return dataclasses.replace(make(("attn.q_proj",), 1), full={("head", "weight"): (whole,)})


def edit(adapter: Adapter, change) -> Adapter:
    sites = {
        path: tuple(w and change(path, i, w) for i, w in enumerate(column)) for path, column in adapter.sites.items()
    }
    return dataclasses.replace(adapter, sites=sites)


def skip_first_layer(adapter: Adapter) -> Adapter:
    return edit(adapter, lambda path, i, w: w if i else None)


def decomposed(params: Params, path, layer: int, weights: LoRAWeights, rng) -> LoRAWeights:
    """With a magnitude up to a third off the identity."""
    leaf = params
    for key in path:
        leaf = leaf[key]
    norm = np.asarray(lora.norms(jnp.asarray(leaf["weight"][layer]), weights.a, weights.b, weights.scale))
    return dataclasses.replace(weights, magnitude=(norm * rng.uniform(0.7, 1.3, norm.shape)).astype(np.float32))
