"""Gates token by token in fp64 numpy, without the code under test, and random gates to try them on."""

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters import gate
from molora_jax.adapters.gate import GateConfig

EPS = 2.0**-23
SMALL = dict(states=3, taps=3, hidden=5)
CONFIGS = {
    "mamba": GateConfig(**SMALL),
    "mamba-diagonal": GateConfig(output="diagonal", activation="bounded", **SMALL),
    "mamba-published": GateConfig(norm=False, start="published", **SMALL),
    "mamba-published-diagonal": GateConfig(norm=False, start="published", output="diagonal", **SMALL),
    "mamba-of-h": GateConfig(reads="h", clamp=1.25, **SMALL),
    "gru": GateConfig(kind="gru", **SMALL),
    "gru-of-h": GateConfig(kind="gru", norm=False, reads="h", output="diagonal", **SMALL),
    "lstm": GateConfig(kind="lstm", activation="bounded", **SMALL),
    "linear": GateConfig(kind="linear"),
    "linear-diagonal-of-h": GateConfig(kind="linear", output="diagonal", reads="h"),
    "gatera": gate.PUBLISHED["gatera"],
    "toplora": GateConfig(kind="toplora", output="diagonal", activation="exp", clamp=2.0),
}
RECURRENT = [name for name, cfg in CONFIGS.items() if cfg.recurrent]
D, R, HEADS = 7, 4, 2


def width(cfg) -> int:
    return R if cfg.reads == "h" else D


def params(cfg, seed=0, *, stack=(), heads=HEADS, spread=0.4):
    """Those of `init` with noise of this spread on every leaf, so that none is at a neutral value."""
    shapes = gate.abstract(cfg, d_in=D, rank=R, heads=heads)
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        name, size = path[-1].key, (*stack, *shape.shape)
        base = {"A_log": np.log(1.0 + np.arange(size[-1])), "D": 1.0, "gain": 0.5}.get(name, 0.0)
        return jnp.asarray(base + spread * rng.standard_normal(size), jnp.float32)

    return jax.tree.map_with_path(leaf, shapes)


def inputs(cfg, rows, tokens, seed=1):
    return np.random.default_rng(seed).standard_normal((rows, tokens, width(cfg))).astype(np.float32)


def wide(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float64), tree)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def silu(z):
    return z * sigmoid(z)


def normed(u):
    return u / np.sqrt(np.mean(u**2) + EPS)


class Mamba:
    """The Mamba-1 block on single tokens; it keeps the last inputs of the convolution and the state of the scan."""

    def __init__(self, cell):
        self.p, self.past, self.h = cell, [], np.zeros(cell["A_log"].shape)

    def __call__(self, x):
        p, channels = self.p, len(self.h)
        u, z = np.split(p["in_proj"]["weight"] @ x, 2)
        weight = p["conv1d"]["weight"][:, 0]
        self.past.append(u)
        conv = p["conv1d"]["bias"].copy()
        for k in range(weight.shape[1]):
            back = weight.shape[1] - 1 - k
            if back < len(self.past):
                conv += weight[:, k] * self.past[-1 - back]
        u = silu(conv)
        low, b, c = np.split(p["x_proj"]["weight"] @ u, [p["dt_proj"]["weight"].shape[1], -self.h.shape[1]])
        dt = np.log1p(np.exp(p["dt_proj"]["weight"] @ low + p["dt_proj"]["bias"]))
        y = np.zeros(channels)
        for i in range(channels):
            for n in range(self.h.shape[1]):
                self.h[i, n] = np.exp(-dt[i] * np.exp(p["A_log"][i, n])) * self.h[i, n] + dt[i] * b[n] * u[i]
                y[i] += c[n] * self.h[i, n]
        return p["out_proj"]["weight"] @ ((y + p["D"] * u) * silu(z))


class GRU:
    def __init__(self, cell):
        self.p, self.h = cell, np.zeros(cell["weight_hh"].shape[1])

    def __call__(self, x):
        gates = self.p["weight_ih"] @ x + self.p["bias_ih"], self.p["weight_hh"] @ self.h + self.p["bias_hh"]
        (xr, xz, xn), (hr, hz, hn) = (np.split(part, 3) for part in gates)
        z = sigmoid(xz + hz)
        self.h = (1 - z) * np.tanh(xn + sigmoid(xr + hr) * hn) + z * self.h
        return self.h


class LSTM:
    def __init__(self, cell):
        self.p, self.h, self.c = cell, *np.zeros((2, cell["weight_hh"].shape[1]))

    def __call__(self, x):
        gates = self.p["weight_ih"] @ x + self.p["bias_ih"] + self.p["weight_hh"] @ self.h + self.p["bias_hh"]
        i, f, g, o = np.split(gates, 4)
        self.c = sigmoid(f) * self.c + sigmoid(i) * np.tanh(g)
        self.h = sigmoid(o) * np.tanh(self.c)
        return self.h


def scale(cfg, z):
    lam = {
        "softplus": lambda: np.log1p(np.exp(z + np.log(np.e - 1))),
        "bounded": lambda: 2 * sigmoid(z),
        "exp": lambda: np.exp(z),
        "sigmoid": lambda: sigmoid(z),
    }[cfg.activation]()
    return lam if cfg.clamp is None else np.minimum(lam, cfg.clamp)


def reference(cfg, tree, x, valid=None, reset=None):
    """λ [B T heads *R] in fp64."""
    p, x = wide(tree), wide(x)
    valid = np.ones(x.shape[:2], bool) if valid is None else valid
    reset = np.zeros(x.shape[:2], bool) if reset is None else reset
    cells = {"mamba": Mamba, "gru": GRU, "lstm": LSTM}
    rows = []
    for row, real, first in zip(x, valid, reset, strict=True):
        cell, lams = None, []
        for token, is_real, is_first in zip(row, real, first, strict=True):
            if cfg.recurrent and (cell is None or is_first):
                cell = cells[cfg.kind](p["cell"])
            if not is_real:
                lams.append(np.ones_like(p["out"]["gain"] if cfg.kind == "toplora" else p["out"]["bias"]))
                continue
            u = p["proj"]["weight"] @ token if "proj" in p else token
            if cfg.recurrent:
                z = p["out"]["weight"] @ cell(normed(u) if cfg.norm else u) + p["out"]["bias"]
            elif cfg.kind == "toplora":
                z = p["out"]["gain"] * normed(u)
            else:
                z = u.reshape(p["out"]["bias"].shape) + p["out"]["bias"]
            lams.append(scale(cfg, z))
        rows.append(lams)
    lam = np.array(rows)
    return lam if cfg.output == "diagonal" else lam[..., 0]
