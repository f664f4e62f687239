"""The scan and all its gradients as float64 numpy loops over tokens, and random operands to feed them."""

import numpy as np

FLOATS = ("u", "dt", "A", "Bm", "Cm", "D", "z", "h0")
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2**-7}  # of the largest entry
UNDERFLOW = 1e-30  # sums of products that fp32 flushes to zero stay below this


def operands(B, T, C, N, *, seed=0) -> dict:
    """Float64 operands with every option in use, no pad and no reset; dt is around 0.05, as at Mamba's start."""
    rng = np.random.default_rng(seed)
    return {
        "u": rng.normal(size=(B, T, C)),
        "dt": np.log1p(np.exp(rng.normal(size=(B, T, C)) - 3)),
        "A": -np.exp(rng.normal(size=(C, N))),
        "Bm": rng.normal(size=(B, T, N)),
        "Cm": rng.normal(size=(B, T, N)),
        "D": rng.normal(size=C),
        "z": rng.normal(size=(B, T, C)),
        "h0": rng.normal(size=(B, C, N)),
        "valid": np.ones((B, T), bool),
        "reset": np.zeros((B, T), bool),
    }


def cotangents(B, T, C, N, *, seed=1):
    """Those of y and of h_T, by the names that `gradients` gives them."""
    rng = np.random.default_rng(seed)
    return {"dy": rng.normal(size=(B, T, C)), "dlast": rng.normal(size=(B, C, N))}


def options(ops: dict) -> dict:
    """The operands, absent ones replaced by what they stand for; z stays None."""
    (B, T, C), N = ops["u"].shape, ops["A"].shape[1]
    neutral = dict(D=np.zeros(C), h0=np.zeros((B, C, N)), valid=np.ones((B, T), bool), reset=np.zeros((B, T), bool))
    given = {name: x for name, x in ops.items() if x is not None}
    return {"z": None} | neutral | given


def silu(z):
    """(silu(z), its slope)."""
    sigmoid = 0.5 * (1 + np.tanh(0.5 * z))
    return z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))


def states(o: dict) -> np.ndarray:
    """h_0 … h_T of every row: [B T+1 C N]. A pad copies the state, a reset forgets it first."""
    h = [o["h0"]]
    for t in range(o["u"].shape[1]):
        before = np.where(o["reset"][:, t, None, None], 0, h[-1])
        after = np.exp(o["dt"][:, t, :, None] * o["A"]) * before
        after = after + (o["dt"][:, t] * o["u"][:, t])[:, :, None] * o["Bm"][:, t, None, :]
        h.append(np.where(o["valid"][:, t, None, None], after, before))
    return np.stack(h, axis=1)


def value(ops: dict):
    """(y [B T C], h_T [B C N])."""
    o = options(ops)
    h = states(o)
    y = np.einsum("btcn,btn->btc", h[:, 1:], o["Cm"]) + o["D"] * o["u"]
    if o["z"] is not None:
        y = y * silu(o["z"])[0]
    return np.where(o["valid"][:, :, None], y, 0), h[:, -1]


def gradients(ops: dict, dy, dlast) -> dict:
    """∂(⟨y, dy⟩ + ⟨h_T, dlast⟩) of every float operand that is there, by back-propagation through every step."""
    o = options(ops)
    h = states(o)
    dy = np.where(o["valid"][:, :, None], dy, 0)
    out = {name: np.zeros_like(o[name]) for name in FLOATS if o[name] is not None}
    if o["z"] is not None:
        gate, slope = silu(o["z"])
        bare = np.einsum("btcn,btn->btc", h[:, 1:], o["Cm"]) + o["D"] * o["u"]
        out["z"] = dy * bare * slope
        dy = dy * gate
    out["D"] = np.einsum("btc,btc->c", dy, o["u"])
    out["u"] += dy * o["D"]
    g = dlast
    for t in reversed(range(o["u"].shape[1])):
        u, dt, b, c = o["u"][:, t], o["dt"][:, t], o["Bm"][:, t], o["Cm"][:, t]
        keep = ~o["reset"][:, t, None, None]
        real = o["valid"][:, t, None, None]
        before = np.where(keep, h[:, t], 0)
        decay = np.exp(dt[:, :, None] * o["A"])
        out["Cm"][:, t] = np.einsum("bcn,bc->bn", h[:, t + 1], dy[:, t])
        g = g + c[:, None, :] * dy[:, t, :, None]
        inner = np.where(real, g, 0)  # what flows into this token's own update
        out["Bm"][:, t] = np.einsum("bcn,bc->bn", inner, dt * u)
        out["u"][:, t] += dt * np.einsum("bcn,bn->bc", inner, b)
        slope = inner * decay * before
        out["dt"][:, t] = np.einsum("bcn,cn->bc", slope, o["A"]) + u * np.einsum("bcn,bn->bc", inner, b)
        out["A"] += np.einsum("bcn,bc->cn", slope, dt)
        g = np.where(keep, np.where(real, decay * g, g), 0)
    out["h0"] = g
    return {name: out[name] for name in FLOATS if ops.get(name) is not None}


def assert_close(got, want, dtype="float32", what="", tolerance=None) -> None:
    """|got - want| <= tolerance · max|want| (or both tiny) everywhere; NaN is never close."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{what}: got shape {got.shape}, expected {want.shape}"
    assert np.isfinite(want).all(), f"{what}: the reference itself is not finite"
    atol = max((tolerance or TOLERANCE[dtype]) * np.abs(want).max(initial=0), UNDERFLOW)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol, err_msg=f"{what} in {dtype}")
