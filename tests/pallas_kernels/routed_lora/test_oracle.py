"""The analytic gradients of the numpy oracle against central differences of its values."""

import numpy as np
import pytest

from tests.pallas_kernels.routed_lora import oracle


@pytest.mark.parametrize("gate", [0, 1, 2])
@pytest.mark.parametrize("soft", [False, True])
def test_oracle_gradients_are_the_slopes_of_its_values(soft, gate):
    ops, g = oracle.operands(5, 4, 3, 3, 2, gate=gate)
    grads = oracle.gradients(ops, g, soft=soft)
    for name, grad in grads.items():
        if name == "weights" and not soft:
            continue
        slope = np.zeros_like(grad)
        for i in np.ndindex(grad.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = dict(ops, **{name: ops[name].copy()})
                moved[name][i] += step
                ends.append(np.sum(oracle.value(moved, soft=soft) * g))
            slope[i] = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(grad, slope, rtol=1e-6, atol=1e-8, err_msg=name)
