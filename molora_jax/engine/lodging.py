"""Who has pages in which model's memory: a routed request needs them only where it runs next."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from molora_jax.config import UserError
from molora_jax.engine.pages import PagePool


@dataclasses.dataclass
class Guest:
    """A request with a slot.

    Attributes:
      slot: row of the request table.
      size: pages that it needs in a memory.
      pages: those that it has in each model's; none where it has to wait for them.
    """

    slot: int
    size: int
    pages: list[list[int]]

    def lodged(self, model: int) -> bool:
        """Whether it can run there."""
        return bool(self.pages[model])


class Lodging:
    """Slots and pages of several models; a page has the same number in all layers of its model.

    A request that runs has pages in the memories of the models that read for it. Those it has elsewhere may be taken
    away under pressure: that model reads its tokens again when it comes back.
    """

    def __init__(self, pages: Sequence[int], *, slots: int, length: int, page_size: int):
        """`pages[m]` is how many there are in the memory of model m."""
        self.page_size, self.width = page_size, -(-length // page_size)
        self.pools = [PagePool(count) for count in pages]
        self._free = list(range(slots - 1, -1, -1))
        self.evictions = 0

    @property
    def free(self) -> bool:
        """Whether any slot is free."""
        return bool(self._free)

    def check(self, limit: int) -> None:
        """Raises `UserError` for a request of `limit` tokens that the pages of some model could not hold."""
        need, least = -(-limit // self.page_size), min(pool.pages for pool in self.pools)
        if need > least:
            raise UserError(f"request: needs {need} KV pages of {self.page_size} tokens, got {least} in all")

    def seat(self, limit: int) -> Guest:
        """Gives a free slot to a request of at most `limit` tokens, and no pages yet."""
        return Guest(self._free.pop(), -(-limit // self.page_size), [[] for _ in self.pools])

    def lodge(self, guest: Guest, model: int) -> bool:
        """Gives it pages in a model's memory, if so many are left."""
        if not guest.lodged(model) and self.pools[model].available >= guest.size:
            guest.pages[model] = self.pools[model].take(guest.size)
        return guest.lodged(model)

    def vacate(self, guest: Guest, model: int) -> None:
        """Takes its pages there away."""
        self.pools[model].release(guest.pages[model])
        guest.pages[model] = []

    def rehouse(self, guests: Sequence[Guest], needs: Sequence[Sequence[int]]) -> list[Guest]:
        """Makes room for those who cannot run, the oldest first, at the expense of those who do not run there.

        Args:
          guests: all that there are, the oldest first.
          needs: the models that read in each one's next run.

        Returns:
          Those whose pages have changed. Whoever still has none waits: all who have run there now, and will end or go
          on to another model.
        """
        changed: dict[int, Guest] = {}
        blocked = [not all(map(guest.lodged, models)) for guest, models in zip(guests, needs, strict=True)]
        for i, guest in enumerate(guests):
            for model in needs[i] if blocked[i] else ():
                # the youngest leave first; of those who are about to run there only younger ones that cannot
                idle = [g for g, models in zip(guests, needs, strict=True) if model not in models]
                stuck = [g for g, stands in zip(guests[i + 1 :], blocked[i + 1 :], strict=True) if stands]
                victims = [g for g in (*stuck, *idle) if g is not guest and g.lodged(model)]
                before = guest.lodged(model)
                while not self.lodge(guest, model) and victims:
                    victim = victims.pop()
                    if victim.lodged(model):
                        self.vacate(victim, model)
                        self.evictions += 1
                        changed[victim.slot] = victim
                if guest.lodged(model) != before:
                    changed[guest.slot] = guest
        return list(changed.values())

    def tables(self, guest: Guest) -> list[np.ndarray]:
        """Its page table in each memory: [P], zeros where it has no pages."""
        rows = np.zeros((len(self.pools), self.width), np.int32)
        for row, pages in zip(rows, guest.pages, strict=True):
            row[: len(pages)] = pages
        return list(rows)

    def give_back(self, guest: Guest) -> None:
        """Frees its slot and all its pages."""
        for model in range(len(self.pools)):
            self.vacate(guest, model)
        self._free.append(guest.slot)


def pages_within(budget: int, page_bytes: Sequence[int], most: int) -> tuple[int, ...]:
    """Pages of each model, the same number for all, so that together they fit into `budget` bytes; at most `most`.

    Raises:
      UserError: a budget without room for a page each.
    """
    count = min(budget // sum(page_bytes), most)
    if count < 1:
        raise UserError(f"kv_bytes: got {budget}, expected at least {sum(page_bytes)}, a page for each model")
    return (count,) * len(page_bytes)
