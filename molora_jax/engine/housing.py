"""Who has pages in the memory of one subserver: a routed request needs them only while it is to be run there."""

from collections.abc import Sequence

import numpy as np

from molora_jax.engine.pages import PagePool
from molora_jax.typing import Int


class Housing:
    """The pages of one model's memory. Under pressure those leave who are elsewhere: they are read again."""

    def __init__(self, pages: int, slots: int, width: int):
        """`pages` in all, for `slots` requests of at most `width` each."""
        self.pool, self._width = PagePool(pages), width
        self._pages: list[list[int]] = [[] for _ in range(slots)]
        self._size = [0] * slots
        self.evictions = 0

    def enter(self, slot: int, size: int) -> None:
        """A new request in a slot needs so many pages; it has none yet."""
        self.leave(slot)
        self._size[slot] = size

    def leave(self, slot: int) -> None:
        """Frees the pages of a slot."""
        self.pool.release(self._pages[slot])
        self._pages[slot] = []

    def housed(self, slot: int) -> bool:
        """Whether it has pages."""
        return bool(self._pages[slot])

    def house(self, slot: int) -> bool:
        """Gives it pages, if there are enough that nobody has."""
        if not self.housed(slot) and self.pool.available >= self._size[slot]:
            self._pages[slot] = self.pool.take(self._size[slot])
        return self.housed(slot)

    def roomy(self, slot: int) -> bool:
        """Whether it has pages, or could have some that nobody has."""
        return self.housed(slot) or self.pool.available >= self._size[slot]

    def make_room(self, here: Sequence[int], elsewhere: Sequence[int]) -> list[int]:
        """Finds pages for those who are `here`, the first first, at the expense of those `elsewhere`, the last first.

        Returns:
          The slots that have lost their pages or got some.
        """
        changed, victims = [], [slot for slot in elsewhere if self.housed(slot)]
        for slot in here:
            if self.housed(slot):
                continue
            while not self.house(slot) and victims:
                self.leave(victims[-1])
                self.evictions += 1
                changed.append(victims.pop())
            if not self.housed(slot):
                break  # those after it must not take what it waits for
            changed.append(slot)
        return changed

    def table(self, slot: int) -> Int[np.ndarray, "P"]:
        """Its page table; zeros where it has no pages."""
        row = np.zeros(self._width, np.int32)
        row[: len(self._pages[slot])] = self._pages[slot]
        return row
