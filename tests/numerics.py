"""The one table of tolerances: how far a result may lie from its reference."""

import numpy as np

TOLERANCES = {
    # kind, dtype of the result: (rtol, atol); atol is a fraction of the reference's largest magnitude
    ("op", "float64"): (1e-13, 1e-13),  # one operation, against fp64 numpy
    ("op", "float32"): (1e-6, 1e-6),
    ("op", "bfloat16"): (2**-8, 2**-9),
    ("model", "float64"): (1e-11, 1e-11),  # a whole decoder, against another way to run it
    ("model", "float32"): (0, 2e-5),
    ("model", "bfloat16"): (0, 5e-2),
}


def assert_close(got, want, kind: str = "op", dtype=None) -> None:
    """|got - want| <= rtol·|want| + atol·max|want| everywhere, by the row of `kind` and of the dtype of `got`.

    `dtype` names the row instead where `got` was computed in less than it is stored in. NaN is never close.
    """
    name = np.dtype(dtype or got.dtype).name
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    assert got.shape == want.shape, f"got shape {got.shape}, expected {want.shape}"
    if not want.size:
        return
    assert np.isfinite(want).all(), "the reference itself is not finite"
    rtol, atol = TOLERANCES[kind, name]
    scale = np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol * scale, err_msg=f"{kind} in {name}, of ±{scale:.3g}")
