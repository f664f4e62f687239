"""Inputs that break the usual shortcuts of a scan: cumulative products, divisions, differences, masks around exp."""

import numpy as np

from tests.pallas_kernels.selective_scan import oracle
from tests.pallas_kernels.selective_scan.run import LONG, MEDIUM, Core


class Hazards(Core):
    """The oracle is exact in each case, and the tolerance the usual one unless the case says why not."""

    def test_no_cumulative_products(self):
        """h = P cumsum(b / P) divides by P = exp(-t/2), which leaves fp32 at t = 176."""
        ops = oracle.operands(*LONG)
        for name in ("u", "dt", "Bm", "Cm"):
            ops[name][:] = 1.0
        ops["A"][:], ops["h0"][:], ops["D"][:] = -0.5, 0.0, 0.0
        (_, last), _ = self.check(ops)
        oracle.assert_close(last, np.full((2, 5, 3), 1 / (1 - np.exp(-0.5))))

    def test_no_differences_of_cumulative_sums(self):
        """exp(S_t - S_s) loses the digits that S has beyond the difference: 1e-3 at steps of up to 160."""
        ops, rng = oracle.operands(*MEDIUM), np.random.default_rng(3)
        ops["dt"] = rng.uniform(size=ops["dt"].shape) * rng.choice([1e-3, 16, 160], size=ops["dt"].shape)
        ops["A"][:] = -1.0
        self.check(ops)

    def test_masks_around_a_strong_decay(self):
        """where(mask, exp(x), 0) has NaN gradients where exp overflows under the mask."""
        ops = oracle.operands(*MEDIUM)
        ops["A"][:], ops["dt"][:] = -2.0, 60.0
        ops["valid"][:, 5::2] = False
        ops["reset"][:, 30] = True
        self.check(ops)

    def test_decayed_state_is_not_a_difference(self):
        """exp(dt A) h_{t-1} as h_t - b_t loses the digits of a small product beside a large input: 1e-5 here."""
        ops = oracle.operands(*MEDIUM)
        ops["A"][:], ops["dt"][:], ops["D"][:] = -6.0, 1.0, 0.0
        ops["u"] *= 50
        self.check(ops, tolerance=2e-6)

    def test_large_steps(self):
        ops = oracle.operands(*MEDIUM)
        ops["dt"] *= 1e4
        self.check(ops)

    def test_states_that_vanish(self):
        """At decays of e^-160 a step every product underflows, and nothing may become NaN."""
        ops = oracle.operands(*MEDIUM)
        ops["A"][:], ops["dt"][:] = -160.0, 1.0
        self.check(ops)

    def test_states_that_last(self):
        """A state in bf16 would be off by percents; 1000 roundings of a factor of 1 - 1e-6 are a few 1e-5."""
        ops = oracle.operands(*LONG)
        ops["A"][:], ops["dt"][:] = -1e-3, 1e-3
        self.check(ops, tolerance=1e-4)

    def test_steps_of_zero_are_the_identity(self):
        ops = oracle.operands(*MEDIUM)
        ops["dt"][:] = 0.0
        (_, last), _ = self.check(ops)
        np.testing.assert_array_equal(last, np.float32(ops["h0"]))
