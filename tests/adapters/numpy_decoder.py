"""A Llama decoder with routed experts in fp64 numpy, plain and slow: what every router and mixture is compared with."""

import dataclasses
from collections.abc import Callable

import numpy as np

from tests.adapters.routing import softmax


@dataclasses.dataclass
class Place:
    """Where weights are asked for.

    Attributes:
      layer, site: the projection.
      x: [N D], its input.
      h: [N D], the input of the first block that experts adapt, on which a decision once a layer looks.
      updates: [J N F] of the experts.
    """

    layer: int
    site: str
    x: np.ndarray
    h: np.ndarray
    updates: np.ndarray


def decode(cfg, params, adapters, rows, weigh: Callable[[Place], np.ndarray] | None, *, factored=False) -> np.ndarray:
    """Hidden states [N D] of rows [B T], with Σ_e weigh(place)[n, e] Δ_e(x_n) at every site, or the sum of factors."""
    get = lambda *path: np.asarray(_get(params, path), np.float64)
    blocks = {path[1] for adapter in adapters for path in adapter.sites}
    x = get("embed", "weight")[rows.reshape(-1)]
    for layer in range(cfg.layers):
        h = {}

        def project(name, v, layer=layer, h=h):
            block, leaf = name.split(".")
            y = v @ get("layers", block, leaf, "weight")[layer].T
            h.setdefault("first", v) if block in blocks else None
            own = [adapter.sites.get(("layers", block, leaf)) for adapter in adapters]
            if weigh is None or all(column is None for column in own):
                return y
            factors = [_factors(column[layer]) if column else None for column in own]
            zero = np.zeros_like(y)
            updates = np.stack([zero if f is None else f[2] * (v @ f[0].T) @ f[1].T for f in factors])
            weights = weigh(Place(layer, name, v, h["first"], updates))
            if factored:
                return y + _factored(v, weights, factors, zero)
            return y + np.einsum("ne,enf->nf", weights, updates)

        v = _norm(x, get("layers", "attn_norm", "weight")[layer], cfg.norm_eps)
        q, k, value = (
            project(f"attn.{n}", v).reshape(*rows.shape, -1, cfg.head_width) for n in ("q_proj", "k_proj", "v_proj")
        )
        out = _attend(cfg, _rotate(cfg, q), _rotate(cfg, k), value)
        x = x + project("attn.o_proj", out.reshape(len(x), -1))
        v = _norm(x, get("layers", "mlp_norm", "weight")[layer], cfg.norm_eps)
        gate = project("mlp.gate_proj", v)
        x = x + project("mlp.down_proj", gate / (1 + np.exp(-gate)) * project("mlp.up_proj", v))
    return _norm(x, get("norm", "weight"), cfg.norm_eps)


def _get(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def _factors(weights):
    return weights.a.astype(np.float64), weights.b.astype(np.float64), weights.scale


def _factored(v, weights, factors, zero):
    out, rank = zero.copy(), max(f[0].shape[0] for f in factors if f is not None)
    for n in range(len(v)):
        a, b = np.zeros((rank, v.shape[1])), np.zeros((zero.shape[1], rank))
        for e, f in enumerate(factors):
            if f is not None:
                a[: len(f[0])] += weights[n, e] * f[0]
                b[:, : len(f[0])] += weights[n, e] * f[2] * f[1]
        out[n] = b @ (a @ v[n])
    return out


def _norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def _rotate(cfg, x):
    """Rotary embedding of halves, [B T H d]."""
    half = cfg.head_width // 2
    angles = np.arange(x.shape[1])[:, None] * cfg.rope.theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attend(cfg, q, k, v):
    out = np.zeros_like(q)
    for head in range(cfg.heads):
        group = head // cfg.queries_per_kv
        scores = np.einsum("bqd,bkd->bqk", q[:, :, head], k[:, :, group]) * cfg.attn_scale
        scores = np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
        out[:, :, head] = softmax(scores) @ v[:, :, group]
    return out
