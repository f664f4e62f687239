"""The policy-gradient algorithms of RLVR as the few choices in which they differ, and what those do to rewards."""

import dataclasses
from typing import Literal

import numpy as np

from molora_jax.config import UserError
from molora_jax.typing import Float, Int

EPSILON = 1e-4
"""Added to the standard deviation that rewards are divided by."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One of `ALGORITHMS`. G rollouts of a prompt are a group, ρ is the ratio of a token's new to its old probability.

    Attributes:
      baseline: what a reward is compared with: the mean of its group, or that of the others in it.
      scaled: whether advantages are divided by the group's standard deviation.
      ratio: what is clipped: ρ of each token, its geometric mean over the rollout, or its product.
      low, high: the ratio is clipped to [1 - low, 1 + high].
      detached: whether the clipped ratio is a constant that weights ∇ log π, instead of what is differentiated.
      mean: of the loss: over the tokens of each rollout, then over rollouts; the sum over a rollout's tokens by the
        most that it could have, then over rollouts; or over all tokens of the batch.
      refilled: whether groups of equal rewards are replaced by those of further prompts.
    """

    baseline: Literal["group", "others"] = "group"
    scaled: bool = True
    ratio: Literal["token", "mean", "product"] = "token"
    low: float = 0.2
    high: float = 0.2
    detached: bool = False
    mean: Literal["rollout", "most", "token"] = "rollout"
    refilled: bool = False


ALGORITHMS = {
    "grpo": Algorithm(),  # Shao et al. 2024, DeepSeekMath §4.1
    "dr_grpo": Algorithm(scaled=False, mean="most"),  # Liu et al. 2025, Understanding R1-Zero-like training §3
    "rloo": Algorithm(baseline="others", scaled=False, ratio="product"),  # Ahmadian et al. 2024: the rollout is one act
    "dapo": Algorithm(high=0.28, mean="token", refilled=True),  # Yu et al. 2025, DAPO §3
    "gspo": Algorithm(ratio="mean", low=3e-4, high=4e-4),  # Zheng et al. 2025, GSPO §4
    "cispo": Algorithm(low=1.0, high=4.0, detached=True, mean="token"),  # MiniMax 2025, M1 §3: no lower bound
}


def algorithm(name: str) -> Algorithm:
    """The algorithm of that name.

    Raises:
      UserError: there is none.
    """
    if name not in ALGORITHMS:
        raise UserError(f"algorithm: got {name!r}, expected one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def advantages(how: Algorithm, rewards: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
    """What each of the G rollouts of each prompt earned beyond its baseline; exactly 0 in a group of equal rewards.

    Group: r_i - mean(r), or with `scaled` (r_i - mean(r)) / (std(r) + ε); the deviation is that of the group itself,
    Σ (r - mean)²/G: the G rollouts are all that the baseline is about. With G - 1 every advantage would be smaller by
    √((G-1)/G), a matter of the learning rate.
    Others: r_i - mean_{j≠i} r_j = G/(G-1) · (r_i - mean(r)).

    Raises:
      UserError: groups of one, which have nothing to compare with.
    """
    rewards = np.asarray(rewards, np.float64)
    size = rewards.shape[1]
    if size < 2:
        raise UserError(f"advantages: got groups of {size}, expected at least 2 rollouts of a prompt: raise per_prompt")
    beyond = rewards - rewards.mean(1, keepdims=True)
    if how.baseline == "others":
        beyond *= size / (size - 1)
    if how.scaled:
        beyond /= rewards.std(1, keepdims=True) + EPSILON
    return np.where(equal(rewards)[:, None], 0.0, beyond)


def equal(rewards: Float[np.ndarray, "P G"]) -> np.ndarray:
    """Which groups have nothing to learn from: all their rewards are the same."""
    return rewards.max(1) == rewards.min(1)


def overlong(lengths: Int[np.ndarray, "*N"], most: int, margin: int) -> Float[np.ndarray, "*N"]:
    """What is taken off the rewards of long rollouts: 0 up to `most - margin` tokens, falling linearly to -1 at `most`.

    DAPO §3.4 (Yu et al. 2025), with lengths in tokens, the stop token included.

    Raises:
      UserError: a margin that is none, or more than all.
    """
    if not 0 < margin <= most:
        raise UserError(f"overlong: got a margin of {margin} tokens of {most}, expected 1 to {most}")
    return -np.clip((np.asarray(lengths) - (most - margin)) / margin, 0.0, 1.0)
