"""What rewards become: against loops over the groups."""

import math

import numpy as np
import pytest

from molora_jax.config import UserError
from molora_jax.training.algorithms import ALGORITHMS, EPSILON, advantages, algorithm, equal, overlong

REWARDS = np.array([[1.0, 0.1, 0.1, 1.1], [0.1] * 4, [0.0, 0.0, 0.0, 1.0], [-1.1, -1.0, 1.2, 1.2]])


def by_hand(name: str, own: list[float]) -> list[float]:
    """Of one group."""
    if len(set(own)) == 1:
        return [0.0] * len(own)
    mean = sum(own) / len(own)
    if name == "rloo":
        return [r - sum(own[:i] + own[i + 1 :]) / (len(own) - 1) for i, r in enumerate(own)]
    if name == "dr_grpo":
        return [r - mean for r in own]
    deviation = math.sqrt(sum((r - mean) ** 2 for r in own) / len(own))
    return [(r - mean) / (deviation + EPSILON) for r in own]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_advantages(name, size):
    rewards = REWARDS[:, -size:]
    want = [by_hand(name, own.tolist()) for own in rewards]
    np.testing.assert_allclose(advantages(algorithm(name), rewards), want, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_group_of_equal_rewards_has_no_advantages_at_all(name):
    rewards = np.full((1, 7), 0.1) * 3  # whose mean is not 0.3 to the bit
    assert rewards.mean() != rewards[0, 0]
    assert (advantages(algorithm(name), rewards) == 0).all()


def test_which_groups_are_equal():
    assert equal(REWARDS).tolist() == [False, True, False, False]
    assert equal(REWARDS[:, 2:]).tolist() == [False, True, False, True]


def test_overlong_rollouts_lose_by_the_token():
    found = overlong(np.arange(21), 20, 4)
    np.testing.assert_array_equal(found, [0] * 17 + [-0.25, -0.5, -0.75, -1])
    assert overlong(np.array([20]), 20, 20) == -1
    assert overlong(np.array([0]), 20, 20) == 0


REFUSED = {
    "groups of one": (lambda: advantages(algorithm("rloo"), np.ones((3, 1))), "got groups of 1, expected at least 2"),
    "an algorithm": (lambda: algorithm("ppo"), "algorithm: got 'ppo', expected one of grpo, dr_grpo, rloo, dapo"),
    "no margin": (lambda: overlong(np.ones(1), 20, 0), "got a margin of 0 tokens of 20"),
    "a margin beyond all": (lambda: overlong(np.ones(1), 20, 21), "got a margin of 21 tokens of 20"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case):
    make, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        make()
