"""The gradients of the numpy oracle against central differences of its values."""

import numpy as np
import pytest

from tests.pallas_kernels.selective_scan import oracle


@pytest.mark.parametrize("absent", [(), ("D", "z", "h0", "valid", "reset")])
def test_oracle_gradients_are_the_slopes_of_its_values(absent):
    ops = oracle.operands(2, 5, 2, 3)
    ops["valid"][0, [0, 3]] = False
    ops["reset"][1, 2] = ops["reset"][0, 3] = True
    ops = {name: None if name in absent else x for name, x in ops.items()}
    ends = oracle.cotangents(2, 5, 2, 3)

    def loss(moved):
        y, last = oracle.value(moved)
        return np.sum(y * ends["dy"]) + np.sum(last * ends["dlast"])

    for name, grad in oracle.gradients(ops, **ends).items():
        slope = np.zeros_like(grad)
        for i in np.ndindex(grad.shape):
            sides = []
            for step in (1e-6, -1e-6):
                moved = dict(ops, **{name: ops[name].copy()})
                moved[name][i] += step
                sides.append(loss(moved))
            slope[i] = (sides[0] - sides[1]) / 2e-6
        np.testing.assert_allclose(grad, slope, rtol=1e-7, atol=1e-8, err_msg=name)
