"""An endless stream of prompts that knows where it is, and what completions of them earn."""

from typing import Any

import numpy as np

from molora_jax.config import UserError
from molora_jax.data.document import Source
from molora_jax.data.example import Example
from molora_jax.data.tasks.reward import EXACT, RELEASED, Reward
from molora_jax.data.testbed.verifier import REWARD

REWARDS = {"testbed": REWARD, "exact": EXACT, "released": RELEASED}


def reward(name: str) -> Reward:
    """The rewards of that name.

    Raises:
      UserError: there are none.
    """
    if name not in REWARDS:
        raise UserError(f"reward: got {name!r}, expected one of {', '.join(REWARDS)}")
    return REWARDS[name]


class Prompts:
    """The examples of a source again and again, in another random order each time.

    Args:
      seed: of the orders.
    """

    def __init__(self, source: Source[Example], seed: int):
        if not len(source):
            raise UserError("prompts: got no example, expected one at least: check the data's file and filters")
        self._source, self._seed, self.at = source, seed, 0
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def take(self, count: int) -> list[Example]:
        """The next ones."""
        return [self._next() for _ in range(count)]

    def get_state(self) -> dict[str, int]:
        """How many have been taken."""
        return dict(at=self.at)

    def set_state(self, state: Any) -> None:
        """Goes to where `get_state` was called."""
        self.at = state["at"]

    def _next(self) -> Example:
        epoch, place = divmod(self.at, len(self._source))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._source))
        self.at += 1
        return self._source[int(self._order[place])]
