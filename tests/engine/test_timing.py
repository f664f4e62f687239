"""Step times by what a run has to do: the plane that fits what was measured, and the loads it is measured at."""

import numpy as np
import pytest

from molora_jax.engine import fused, timing
from molora_jax.engine.run import Fleet
from molora_jax.routing.programs.bernoulli import Bernoulli
from molora_jax.routing.programs.spec_reason import SpecReason
from tests.routing import routed

POINTS = [(1, 1), (1, 64), (8, 8), (8, 64), (16, 16), (16, 64)]
FLEET = (routed.config(1), routed.config(2))


@pytest.fixture(
    scope="module", params=[Bernoulli(), SpecReason((1, 2), digits=(3, 4), longest=9)], ids=["plain", "tail"]
)
def plan(request) -> fused.Plan:
    return fused.plan(Fleet(FLEET, request.param), 6, 24, 4)


def test_a_plane_is_found_again():
    points = [(rows, tokens, 2.0 + 0.5 * rows + 0.25 * tokens) for rows, tokens in POINTS]
    np.testing.assert_allclose(timing.plane(points), [2.0, 0.5, 0.25], atol=1e-9)


def test_slopes_that_noise_makes_negative_are_none():
    points = [(rows, tokens, 2.0 - 0.01 * rows + 0.25 * tokens) for rows, tokens in POINTS]
    start, per_row, per_token = timing.plane(points)
    assert per_row == 0
    assert per_token == pytest.approx(0.25, rel=0.05)
    falling = timing.plane([(rows, tokens, 3.0 - 0.01 * tokens) for rows, tokens in POINTS])
    np.testing.assert_allclose(falling, [3.0 - 0.01 * np.mean([tokens for _, tokens in POINTS]), 0, 0])
    assert timing.plane([(1, 1, -5.0), (2, 2, -5.0)])[0] > 0


def test_all_loads_fit_their_bucket_and_span_it(plan):
    for choice, (run, bucket) in enumerate(plan.choices):
        tail = len(plan.fleet.tail(run))
        found = timing.loads(plan, choice, 100)
        tokens = [load.rows * (load.unread + tail) for load in found]
        assert {load.rows for load in found} >= {1, bucket.rows}
        assert max(tokens) <= bucket.tokens
        assert max(tokens) > bucket.tokens - bucket.rows * (1 + tail)
        assert all(load.unread >= 1 for load in found)


def test_measuring_gives_back_the_step_times_that_there_are(plan):
    """A clock that only knows a formula, and is slow in its first round."""
    rounds = {}

    def run(choice: int, load: timing.Load) -> float:
        rounds[choice, load] = rounds.get((choice, load), 0) + 1
        late = 9.0 if rounds[choice, load] == 1 else 0.0
        if choice == fused.NONE:
            return 0.5 + late
        tail = len(plan.fleet.tail(plan.choices[choice][0]))
        return 0.5 + 1.0 + choice + 0.1 * load.rows + 0.01 * load.rows * (load.unread + tail) + late

    got = timing.measure(plan, run, 100, 2)
    assert got.look == 0.5
    flat = [bucket.rows == bucket.tokens == 1 for _, bucket in plan.choices]
    want = [(1.0 + choice, 0.1, 0.01) for choice in range(len(plan.choices))]
    np.testing.assert_allclose(got.seconds[np.invert(flat)], np.array(want)[np.invert(flat)], rtol=1e-4)
