"""The experts by name: which of them are in the bank, and hot swap of the others from host memory."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.bank import Bank
from molora_jax.adapters.digest import adapter_digest
from molora_jax.adapters.shared import with_shared
from molora_jax.adapters.spec import BankSpec, new_bank, pack, size, write
from molora_jax.config import UserError
from molora_jax.typing import Params


@dataclasses.dataclass(eq=False)
class _Expert:
    """One version of an adapter; its row stays on the host."""

    name: str
    row: Bank
    digest: str
    slot: int | None = None
    users: int = 0


class Library:
    """All experts of a model, more than the bank has slots if need be; one program, compiled here, swaps them.

    Attributes:
      spec: the bank's.
      bank: on the device; another object after every swap, of the same shapes.
      swaps: experts written into the bank so far.
    """

    def __init__(self, spec: BankSpec, params: Params, *, shared: Adapter | None = None):
        """`shared` is an adapter that every token has beside its expert, for good (`adapters.shared`)."""
        self.spec, self._params, self.swaps = spec, params, 0
        self.bank = new_bank(spec, params)
        if shared is not None:
            self.bank = with_shared(self.bank, params, shared)
        row = pack(spec, params, Adapter(name="", sites={}))
        swap = jax.jit(write, donate_argnums=0)
        self._write = swap.lower(self.bank, np.int32(0), row).compile()
        self._experts: dict[str, _Expert] = {}
        self._resident: collections.OrderedDict[int, _Expert | None] = collections.OrderedDict.fromkeys(
            range(spec.slots)
        )  # by slot, the longest unused first
        self._pinned: set[_Expert] = set()
        self.bytes = size(spec, params)

    @classmethod
    def holding(cls, adapters: Sequence[Adapter], params: Params, *, shared: Adapter | None = None) -> "Library":
        """The library of `adapters` alone, all in the bank for good: the first in slot 0, and so on."""
        library = cls(BankSpec.holding(adapters), params, shared=shared)
        for adapter in adapters:
            library.add(adapter)
        library.slots(library.names)
        return library

    @property
    def names(self) -> tuple[str, ...]:
        """Experts by name, in the order in which they came."""
        return tuple(self._experts)

    @property
    def resident(self) -> dict[str, int]:
        """The experts that are in the bank now, and their slots."""
        return {expert.name: slot for slot, expert in self._resident.items() if expert is not None}

    def add(self, adapter: Adapter) -> None:
        """Takes an expert in, or a new version of one: what runs goes on with the version that it began with.

        Raises:
          UserError: it does not fit the spec; nothing has changed then.
        """
        row = pack(self.spec, self._params, adapter)
        old = self._experts.get(adapter.name)
        self._experts[adapter.name] = _Expert(adapter.name, row, adapter_digest(adapter))
        if old is not None:
            self._forget(old)

    def remove(self, name: str) -> None:
        """Forgets an expert; its slot is free once nothing uses it."""
        self._forget(self._get(name))
        del self._experts[name]

    def digest(self, name: str) -> str:
        """Tells an expert's content from any other."""
        return self._get(name).digest

    def held_digest(self, slot: int) -> str:
        """Tells the content of a slot in use, which may be of an older version than its name stands for now."""
        return self._resident[slot].digest

    def acquire(self, name: str) -> int | None:
        """The slot of an expert, swapped in if need be, and held until `release`; None if every slot is held."""
        expert = self._get(name)
        if expert.slot is None:
            free = next((slot for slot, held in self._resident.items() if held is None or not held.users), None)
            if free is None:
                return None
            self._put(free, expert)
        expert.users += 1
        self._resident.move_to_end(expert.slot)
        return expert.slot

    def release(self, slot: int) -> None:
        """Gives up one hold of a slot."""
        expert = self._resident[slot]
        expert.users -= 1
        if not expert.users and self._experts.get(expert.name) is not expert:
            self._forget(expert)

    def slots(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Puts all of `names` into the bank for good, as a router needs them, and says where.

        Raises:
          UserError: an unknown name, or more of them than there are slots left.
        """
        found = []
        for name in names:
            slot = self.acquire(name)
            if slot is None:
                raise UserError(
                    f"bank: got {len(names)} experts for a router, expected at most {len(found)} more slots"
                )
            self._pinned.add(self._get(name))
            found.append(slot)
        return tuple(found)

    def check(self, names: Iterable[str]) -> None:
        """Whether some experts can ever be in the bank together.

        Raises:
          UserError: an unknown name, or more of them than there are slots that nothing holds for good.
        """
        swapped = [name for name in names if self._get(name) not in self._pinned]
        if len(swapped) > (free := self.spec.slots - len(self._pinned)):
            asked, held = ", ".join(map(repr, sorted(swapped))), len(self._pinned)
            raise UserError(
                f"adapter: got {asked} for one request, expected at most {free} experts beside the {held} that a rule "
                "or a router holds: give the bank more slots"
            )

    def _put(self, slot: int, expert: _Expert) -> None:
        old = self._resident[slot]
        if old is not None:
            old.slot = None
        self.bank = self._write(self.bank, np.int32(slot), expert.row)
        self._resident[slot], expert.slot = expert, slot
        self.swaps += 1

    def _forget(self, expert: _Expert) -> None:
        """Frees the slot of a version that is no more, unless it is in use."""
        if expert.slot is not None and not expert.users:
            self._resident[expert.slot] = None
            self._resident.move_to_end(expert.slot, last=False)
            expert.slot = None

    def _get(self, name: str) -> _Expert:
        if name not in self._experts:
            raise UserError(f"adapter: got {name!r}, expected one of {', '.join(map(repr, self._experts)) or 'none'}")
        return self._experts[name]
