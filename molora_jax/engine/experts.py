"""The experts that an engine's requests use: which token has which, on the host and on the device."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters.bank import APART, Bank
from molora_jax.adapters.library import Library
from molora_jax.adapters.mixtures.xlora import XLoRA
from molora_jax.adapters.route import LAYER, NONE, ROUTED, Choice
from molora_jax.adapters.vocabulary import KEEP, table
from molora_jax.config import UserError
from molora_jax.typing import Array, Int

UNSET = -4
"""In the request table: the rule will say, once the token is known."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapters:
    """What the programs of an engine see.

    Attributes:
      bank: the experts.
      router: decides for the tokens that are `ROUTED`; None if none is.
      rule: the expert that each token id calls for, `KEEP` where it calls for none.
    """

    bank: Bank
    router: Any
    rule: Int[Array, "V"]


@dataclasses.dataclass(frozen=True, eq=False)
class Assignment:
    """The experts of one request.

    Attributes:
      ids: of each position: the prompt's, and of later ones those that were asked for, else `UNSET`.
      names: by id.
      held: slots to give back.
    """

    ids: np.ndarray
    names: dict[int, str | None]
    held: tuple[int, ...]


class Experts:
    """Assigns experts to requests, and holds the slots of those in use.

    A request names one expert for all its tokens (`adapter`), or one for each (`route`); else a rule on token ids
    decides, from the first token that it knows on, or the router.
    """

    def __init__(
        self, library: Library, vocab: int, *, router: Any = None, rule: Mapping[int, str | None] | None = None
    ):
        """`rule` maps token ids to names (None: the base): a vocabulary's ranges, or control tokens.

        Raises:
          UserError: a rule's name or token id that does not exist, too few slots for what must stay resident, or a
            router over a bank that adapts the model's ends.
        """
        self.library, self.router = library, router
        if router is not None and (library.bank.ends or library.bank.whole):
            raise UserError(
                "router: got a bank that adapts the embedding or the head, expected layers only: a router decides "
                "inside the layers"
            )
        rule = rule or {}
        ruling = tuple(dict.fromkeys(name for name in rule.values() if name is not None))
        slots = dict(zip(ruling, library.slots(ruling), strict=True))
        self._rule = table(rule, slots, vocab, other=KEEP)
        self._rule_names = {NONE: None} | {slot: name for name, slot in slots.items()}

    @property
    def adapters(self) -> Adapters:
        """As the device sees them now."""
        return Adapters(self.library.bank, self.router, self._rule)

    @property
    def scouts(self) -> bool:
        """Whether the router reads hidden states of the base alone, a pass before the experts'."""
        return isinstance(self.router, XLoRA)

    @property
    def choices(self) -> int:
        """Choices that a token has in each layer."""
        if self.scouts:
            return max(len(self.router.sites), 1)
        sites = self.library.bank.layers if self.library.bank.stacked else self.library.bank.layers[0]
        per_site = self.router is not None and self.router.per_site
        return sum(len(leaves) for block, leaves in sites.items() if block not in APART) if per_site else 1

    def check(self, adapter: str | None, route: Sequence[str | None] | None) -> None:
        """Raises `UserError` for names that are not in the library, or for more experts than it can hold at once."""
        self.library.check(set([adapter] if route is None else route) - {None})

    def assign(
        self, prompt: Sequence[int], length: int, adapter: str | None, route: Sequence[str | None] | None
    ) -> Assignment | None:
        """The experts of a request of at most `length` tokens; None while too few slots are free."""
        slots: dict[str | None, int] = {None: NONE}
        held: list[int] = []
        for name in set([adapter] if route is None else route) - {None}:
            slot = self.library.acquire(name)
            if slot is None:
                self._give_back(held)
                return None
            slots[name] = slot
            held.append(slot)
        ids = np.full(length, UNSET, np.int32)
        if route is not None:
            given = [slots[name] for name in route[:length]]
            ids[: len(given)] = given
            first = given[-1] if given else NONE
        else:
            first = ROUTED if adapter is None and self.router is not None else slots[adapter]
        ids[: len(prompt)] = self._resolve(ids[: len(prompt)], prompt, first)
        return Assignment(ids, self._rule_names | {slot: name for name, slot in slots.items()}, tuple(held))

    def names(self, assignment: Assignment) -> dict[int, str | None]:
        """Names by slot: the request's, the rule's, and those that a router may choose."""
        return {slot: name for name, slot in self.library.resident.items()} | assignment.names

    def release(self, assignment: Assignment) -> None:
        """Gives back the slots that a request held."""
        self._give_back(assignment.held)

    def marked(self, assignment: Assignment, tokens: Sequence[int], own: int | None = None) -> np.ndarray:
        """Token ids beside all else that their keys depend on: equal rows, equal keys and values.

        Args:
          own: a number that no other request has, where it must share nothing.
        """
        ids = self._resolve(assignment.ids[: len(tokens)], tokens, NONE)
        mark = {NONE: 0, ROUTED: 1}  # a router's experts stay resident: one number stands for all that it can choose
        for slot, name in assignment.names.items():
            if name is not None:
                mark[slot] = int.from_bytes(bytes.fromhex(self.library.held_digest(slot))[:8], "little", signed=True)
        marks = np.array([mark[i] for i in ids.tolist()], np.int64)
        columns = [np.asarray(tokens, np.int64), marks]
        return np.stack(columns if own is None else [*columns, np.full(len(ids), own)], axis=1)

    def _resolve(self, ids: np.ndarray, tokens: Sequence[int], first: int) -> np.ndarray:
        """`ids` with what is unset filled in by the rule, the first one from `first` on."""
        resolved, last = np.empty_like(ids), first
        for i, token in enumerate(tokens):
            if ids[i] != UNSET:
                last = ids[i]
            elif self._rule[token] != KEEP:
                last = self._rule[token]
            resolved[i] = last
        return resolved

    def _give_back(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.library.release(slot)


def next_expert(adapters: Adapters, asked: Int[Array, "B"], token: Int[Array, "B"], last: Int[Array, "B"]):
    """The expert of a token that was just given, where none was asked for: the rule's, or that of the one before."""
    called = adapters.rule[token]
    ruled = jnp.where(called == KEEP, last, called)
    return jnp.where(asked == UNSET, ruled, asked)


def traced(trace: Mapping[str, Choice]) -> Int[Array, "N K"]:
    """The strongest expert of each token in each layer, decision by decision: K = layers × decisions."""
    strongest = lambda choice: choice.ids if choice.ids is not None else jnp.argmax(choice.weights, axis=-1)
    names = [LAYER] if LAYER in trace else sorted(trace)
    return jnp.concatenate([strongest(trace[name]).T for name in names], axis=1).astype(jnp.int16)
