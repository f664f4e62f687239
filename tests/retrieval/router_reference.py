"""A router in fp64 numpy, question by question and segment by segment, and random routers to try it on."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.retrieval import mara, mixers
from molora_jax.retrieval.mara import MaraConfig
from tests.adapters.gate_reference import GRU, Mamba, wide

SMALL = dict(encoding=6, width=8, pool_width=5, states=3, taps=3)


def config(mixer="mamba", **fields) -> MaraConfig:
    return MaraConfig(mixer=mixer, **SMALL | dict(slots=0 if mixer in mixers.ORDER_FREE else 7) | fields)


def params(cfg, seed=0, spread=0.4):
    """Noise on every leaf of `abstract`, around what keeps a Mamba block stable, so that none is at a neutral value."""
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        base = {"A_log": np.log(1.0 + np.arange(shape.shape[-1])) if shape.shape else 0, "D": 1.0, "norm": 1.0}
        known = [base[entry.key] for entry in path if entry.key in base]
        return jnp.asarray((known or [0.0])[0] + spread * rng.standard_normal(shape.shape), shape.dtype)

    return jax.tree.map_with_path(leaf, mara.abstract(cfg))


def segments(rows, count, seed=1):
    return np.random.default_rng(seed).standard_normal((rows, count, SMALL["encoding"])).astype(np.float32)


def score(cfg, tree, encodings, anchors=()):
    """(local [G], slots [G] or None) of one question's segments [G D], none of them a pad."""
    p, e = wide(tree), wide(encodings)
    z = [p["proj"] @ x for x in e]
    places = range(len(z))
    if cfg.mixer == "sorted":
        places = sorted(places, key=lambda i: -(p["first"] @ z[i]))
    x = [z[a] + p["anchor"] for a in anchors if a >= 0]
    count = len(x)
    x = np.array(x + [z[i] for i in places])
    for i in range(cfg.layers):
        x = layer(cfg.mixer, jax.tree.map(lambda leaf, i=i: leaf[i], p["mixer"]), x, count)
    s = dict(zip(places, x[count:], strict=True))
    local = [p["local"]["weight"] @ s[i] + p["local"]["bias"] for i in range(len(z))]
    if cfg.mixer == "sorted":
        local = [value + p["first"] @ z[i] for i, value in enumerate(local)]
    slots = p["slots"]["weight"] @ x[-1] + p["slots"]["bias"] if cfg.slots else None
    return np.array(local), slots if slots is None else slots[: len(z)]


def layer(kind, p, x, anchors):
    h = normed(x, p["norm"]["weight"])
    if kind == "gru":
        cell = GRU(p["gru"])
        return x + np.array([cell(u) for u in h])
    if kind == "transformer":
        x = x + attend(p["attention"], h)
        return x + np.array([feed_forward(p["mlp"], u) for u in normed(x, p["mlp_norm"]["weight"])])
    if kind == "mlp":
        return x + np.array([feed_forward(p["mlp"], np.concatenate([u, h.mean(axis=0)])) for u in h])
    cell = Mamba(p["forward"])
    y = x + np.array([cell(u) for u in h])
    if kind == "bimamba":
        order = [*range(anchors), *reversed(range(anchors, len(x)))]
        cell = Mamba(p["backward"])
        for i in order:
            y[i] += cell(h[i])
    return y


def normed(x, weight):
    return np.array([u / np.sqrt(np.mean(u**2) + 1e-5) * weight for u in x])


def feed_forward(p, u):
    h = p["up"]["weight"] @ u + p["up"]["bias"]
    h = np.array([0.5 * v * (1 + math.erf(v / np.sqrt(2))) for v in h])
    return p["down"]["weight"] @ h + p["down"]["bias"]


def attend(p, x):
    q, k, v = (np.array([p[name]["weight"] @ u + p[name]["bias"] for u in x]) for name in "qkv")
    d = x.shape[1] // mixers.HEADS
    out = np.zeros_like(x)
    for h in range(mixers.HEADS):
        part = slice(h * d, (h + 1) * d)
        for i in range(len(x)):
            w = np.exp([q[i, part] @ k[j, part] / np.sqrt(d) for j in range(len(x))])
            out[i, part] = w @ v[:, part] / w.sum()
    return np.array([p["o"]["weight"] @ u + p["o"]["bias"] for u in out])
