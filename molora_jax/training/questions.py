"""Examples of a domain or a benchmark by one name, and an endless stream of them that knows where it is."""

from typing import Any

import numpy as np

from molora_jax.config import UserError
from molora_jax.data.document import Source
from molora_jax.data.example import Example
from molora_jax.data.rows import Report
from molora_jax.data.tasks import registry
from molora_jax.data.tasks.reward import EXACT, RELEASED, Reward
from molora_jax.data.testbed.recipe import Stream, specialist
from molora_jax.data.testbed.verifier import REWARD

TESTBED = "testbed:"
"""Before the name of a testbed domain."""
DRAWN = 1 << 20
"""Examples of a testbed domain in a split; no run gets to their end."""
REWARDS = {"testbed": REWARD, "exact": EXACT, "released": RELEASED}


def questions(
    name: str,
    split: str,
    *,
    data_dir: str | None = None,
    strict: bool = False,
    report: Report | None = None,
) -> Source[Example]:
    """The examples of `testbed:calc` (or another domain), under the house rule, or of a benchmark of `data.tasks`.

    Raises:
      UserError: no such domain, benchmark, split or file.
    """
    if name.startswith(TESTBED):
        return Stream(specialist(name.removeprefix(TESTBED)), split, 0, DRAWN)
    return registry.task(name).load(split, data_dir=data_dir, strict=strict, report=report)


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
