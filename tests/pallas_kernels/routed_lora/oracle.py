"""The operation and its gradients as float64 numpy loops over tokens and experts, and random operands to feed them."""

import numpy as np

OPERANDS = ("x", "a", "b", "route", "scale", "weights", "gate")
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}  # of the largest entry


def operands(n, d, f, e, r, *, gate=0, seed=0):
    """Float64 operands; `gate` is its number of axes, 0 for none. A third of the ids are random, some are -1."""
    rng = np.random.default_rng(seed)
    made = {
        "x": rng.normal(size=(n, d)),
        "a": rng.normal(size=(e, r, d)),
        "b": rng.normal(size=(e, f, r)),
        "route": rng.integers(-1, e, n).astype(np.int32),
        "scale": rng.uniform(0.5, 2.0, e),
        "weights": rng.dirichlet(np.ones(e), n) * (rng.random((n, e)) > 0.3),
        "gate": (None, rng.normal(size=n), rng.normal(size=(n, r)))[gate],
    }
    return made, rng.normal(size=(n, f))


def parts(ops, n, e):
    """(scalar gate, rank gate [R], scale) of token n under expert e."""
    gate = ops["gate"]
    rank = ops["a"].shape[1]
    outer = gate[n] if gate is not None and gate.ndim == 1 else 1.0
    inner = gate[n] if gate is not None and gate.ndim == 2 else np.ones(rank)
    return outer, inner, ops["scale"][e]


def pairs(ops, *, soft):
    """(token, expert, weight) of everything that enters the output."""
    count, experts = len(ops["x"]), len(ops["a"])
    if soft:
        return [(n, e, ops["weights"][n, e]) for n in range(count) for e in range(experts)]
    return [(n, int(ops["route"][n]), 1.0) for n in range(count) if 0 <= ops["route"][n] < experts]


def value(ops, *, soft=False):
    y = np.zeros((len(ops["x"]), ops["b"].shape[1]))
    for n, e, w in pairs(ops, soft=soft):
        outer, inner, scale = parts(ops, n, e)
        y[n] += w * outer * scale * (ops["b"][e] @ (inner * (ops["a"][e] @ ops["x"][n])))
    return y


def gradients(ops, g, *, soft=False, straight_through=False):
    """d⟨y, g⟩ of every float operand; weights are those of the mixture, or the straight-through ones of the ids."""
    grads = {k: np.zeros_like(v) for k, v in ops.items() if v is not None and k != "route"}
    for n, e, w in pairs(ops, soft=soft):
        outer, inner, scale = parts(ops, n, e)
        u, v = ops["a"][e] @ ops["x"][n], ops["b"][e].T @ g[n]
        c = w * outer * scale
        grads["x"][n] += c * (ops["a"][e].T @ (inner * v))
        grads["a"][e] += c * np.outer(inner * v, ops["x"][n])
        grads["b"][e] += c * np.outer(g[n], inner * u)
        grads["scale"][e] += w * outer * np.sum(inner * u * v)
        if "gate" in grads:
            grads["gate"][n] += w * scale * (np.sum(u * v) if ops["gate"].ndim == 1 else outer * u * v)
    if soft or straight_through:
        routed = np.arange(len(ops["x"])) if soft else np.flatnonzero(ops["route"] >= 0)
        for n in routed:
            for e in range(len(ops["a"])):
                outer, inner, scale = parts(ops, n, e)
                u, v = ops["a"][e] @ ops["x"][n], ops["b"][e].T @ g[n]
                grads["weights"][n, e] = outer * scale * np.sum(inner * u * v)
    return grads


def assert_close(got, want, dtype, what=""):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (what, got.shape, want.shape)
    worst = np.max(np.abs(got - want), initial=0.0)
    assert worst <= TOLERANCE[str(dtype)] * max(np.max(np.abs(want), initial=0.0), 1e-30), (what, worst)
