"""A tiny golden model with a bank of random experts, for the tests of routing; and routing in fp64 numpy."""

import dataclasses
import functools

import jax
import numpy as np

from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.library import Library
from molora_jax.adapters.spec import BankSpec
from molora_jax.models import transformer
from molora_jax.nn.layout import dense
from tests import fakes

NAME = "llama_untied"
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
RANKS = (3, 1, 2)
SITES = (("attn.q_proj", *MLP[1:]), MLP[1:2], ("attn.q_proj", "attn.o_proj", MLP[2]))
"""Of the experts, which have other ranks, and adapt other projections."""
SHAPE = (2, 7)


@functools.cache
def world(sites=SITES, layers=2):
    """(config, parameters, adapters, library): three experts in slots 0 to 2 of a bank with room for more."""
    cfg, params = fakes.model(NAME)
    cfg = dataclasses.replace(cfg, layers=layers, windows=cfg.windows[:layers])
    params = params | {"layers": jax.tree.map(lambda w: w[:layers], params["layers"])}
    adapters = tuple(
        fresh(cfg, params, f"e{i}", rank=RANKS[i], sites=sites[i], seed=i, spread=0.3) for i in range(len(sites))
    )
    library = Library(BankSpec.holding(adapters, slots=5), params)
    for adapter in adapters:
        library.add(adapter)
    library.slots(library.names)
    return cfg, params, adapters, library


def tokens(cfg, seed=0, shape=SHAPE):
    return np.random.default_rng(seed).integers(0, cfg.vocab, shape).astype(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def run(cfg, params, tokens, bank, route, layout=None):
    """`transformer.apply` of rows [B T]."""
    layout = dense(*tokens.shape) if layout is None else layout
    return transformer.apply(cfg, params, tokens.reshape(-1), layout, bank=bank, route=route)


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def deltas(x: np.ndarray, site) -> np.ndarray:
    """[E N F]: each expert's update, one at a time."""
    a, b, scale = (np.asarray(v, np.float64) for v in (site.a, site.b, site.scale))
    return np.stack([scale[e] * (x @ a[e].T) @ b[e] for e in range(len(a))])


def identical(got, want) -> None:
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
