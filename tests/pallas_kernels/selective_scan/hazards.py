"""Inputs that break the usual shortcuts of a scan: cumulative products, divisions, differences, masks inside exp."""

import numpy as np

from tests.pallas_kernels.selective_scan import oracle
from tests.pallas_kernels.selective_scan.cases import SMALL, Core


def constant(length, decay_exponent, *, B=2, C=5, N=3):
    """dt = 1, u = B = C = 1 and A everywhere `decay_exponent`, from a zero state."""
    ops = oracle.operands(B, length, C, N)
    for name in ("u", "dt", "Bm", "Cm"):
        ops[name][:] = 1.0
    ops["A"][:], ops["h0"][:], ops["D"][:] = decay_exponent, 0.0, 0.0
    return ops


class Hazards(Core):
    """Each case is exact in fp64; the tolerance is the usual one unless the case says so."""

    def test_no_cumulative_products(self):
        """h = P cumsum(b / P) divides by P = exp(-T/2), which leaves fp32 at T = 176."""
        ops = constant(200, -0.5) | {"z": None}
        y, last = self.value(ops)
        h = (1 - np.exp(-0.5 * np.arange(1, 201))) / (1 - np.exp(-0.5))
        oracle.assert_close(y[0, :, 0], 3 * h)
        oracle.assert_close(last, np.full((2, 5, 3), h[-1]))

    def test_no_differences_of_cumulative_sums(self):
        """exp(S_t - S_s) loses the digits that S has more than the difference: 1e-3 at steps of up to 160."""
        ops = oracle.operands(*SMALL)
        rng = np.random.default_rng(3)
        ops["dt"] = rng.uniform(size=ops["dt"].shape) * rng.choice([1e-3, 16, 160], size=ops["dt"].shape)
        ops["A"][:] = -1.0
        self.check(ops)

    def test_gradients_where_a_mask_meets_a_strong_decay(self):
        """where(mask, exp(x), 0) has NaN gradients where exp overflows under the mask."""
        ops = oracle.operands(*SMALL)
        ops["A"][:], ops["dt"][:] = -2.0, 60.0
        ops["valid"][:, 5::2] = False
        ops["reset"][:, 30] = True
        self.check(ops)

    def test_decayed_state_is_no_difference(self):
        """exp(dt A) h_{t-1} as h_t - b_t loses the digits of a small product beside a large input."""
        ops = oracle.operands(*SMALL)
        ops["A"][:], ops["dt"][:] = -6.0, 1.0
        ops["u"] *= 50
        ops["Cm"] *= 1e-3
        low, grads = self.check(ops), oracle.gradients(ops, *oracle.cotangents(*SMALL))
        worst = np.abs(np.asarray(low["A"], np.float64) - grads["A"]).max() / np.abs(grads["A"]).max()
        assert worst < 2e-6

    def test_large_steps(self):
        ops = oracle.operands(*SMALL)
        ops["dt"] *= 1e4
        self.check(ops)

    def test_states_that_vanish(self):
        """Decays of e^-160 a step: every product underflows, nothing may become NaN."""
        ops = oracle.operands(*SMALL)
        ops["A"][:], ops["dt"][:] = -160.0, 1.0
        self.check(ops)

    def test_states_that_last(self):
        """A factor of 1 - 1e-6 a step; a state kept in bf16 is off by percents."""
        ops = oracle.operands(1, 600, 5, 3)
        ops["A"][:], ops["dt"][:] = -1e-3, 1e-3
        self.check(ops)

    def test_zero_steps_are_the_identity(self):
        ops = oracle.operands(*SMALL)
        ops["dt"][:] = 0.0
        _, last = self.value(ops)
        np.testing.assert_array_equal(last, np.float32(ops["h0"]))
