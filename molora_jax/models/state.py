"""What a model remembers of its requests between two calls."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from molora_jax.adapters import bank_gates
from molora_jax.adapters.bank import Bank
from molora_jax.config import ModelConfig
from molora_jax.nn.attention import KVTable
from molora_jax.typing import Array, Int, Params


@functools.partial(jax.tree_util.register_dataclass, data_fields=["kv", "gates"], meta_fields=["pages", "page_size"])
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The KV table and its geometry, and what gates remember. Passed in, returned, donated.

    Attributes:
      kv: the rows of all layers.
      pages: how many pages a layer of each kind has (`ModelConfig.kinds`).
      page_size: token rows of a page.
      gates: states of the experts' recurrent gates by stack (`adapters.bank_gates`), leaves [L slots ...], or a list of
        L with leaves [slots ...] for unrolled layers, one of which a CPU would copy whole with every other; every core
        has read every token of the request in its slot.
    """

    kv: KVTable
    pages: tuple[int, ...]
    page_size: int
    gates: dict[str, Params] | list[dict[str, Params]] = dataclasses.field(default_factory=dict)

    def bases(self, cfg: ModelConfig) -> tuple[int, ...]:
        """Per layer, the first row of its share of the table."""
        bases, row = [], 0
        for kind in cfg.kind_of_layer:
            bases.append(row)
            row += self.pages[kind] * self.page_size
        return tuple(bases)

    def at(self, layer: int | Array) -> "DecodeState":
        """The state as one layer sees it, with its own gates alone: leaves [slots ...]."""
        unrolled = isinstance(self.gates, list)
        own = self.gates[layer] if unrolled else jax.tree.map(lambda leaf: leaf[layer], self.gates)
        return dataclasses.replace(self, gates=own)

    def put(self, layer: int | Array, own: "DecodeState") -> "DecodeState":
        """The state after a layer has made `own` of `at(layer)`."""
        if isinstance(self.gates, list):
            gates = [*self.gates[:layer], own.gates, *self.gates[layer + 1 :]]
        else:
            gates = jax.tree.map(lambda leaf, new: leaf.at[layer].set(new), self.gates, own.gates)
        return dataclasses.replace(own, gates=gates)


def kv_rows(cfg: ModelConfig, pages: tuple[int, ...], page_size: int) -> int:
    """Rows that the KV table of a model has."""
    return sum(pages[kind] * page_size for kind in cfg.kind_of_layer)


def new_state(
    cfg: ModelConfig,
    *,
    pages: tuple[int, ...],
    page_size: int,
    dtype=jnp.float32,
    bank: Bank | None = None,
    slots: int = 0,
) -> DecodeState:
    """A zeroed state with `pages[k]` pages for every layer of kind k, and for the gates of a bank, if it has any."""
    shape = (kv_rows(cfg, pages, page_size), 2 * cfg.kv_width)
    gates = bank_gates.new_state(bank.gates, bank.layers, slots) if bank is not None and bank.gates else {}
    return DecodeState(KVTable(jnp.zeros(shape, dtype)), pages, page_size, gates)


def snapshot(state: DecodeState, slots: Int[Array, "B"]) -> dict[str, Params]:
    """What the gates remember of some slots: to be put back after a rollback, or into other slots."""
    return jax.tree.map(lambda leaf: leaf[_rows(state, slots)], state.gates)


def restore(state: DecodeState, slots: Int[Array, "B"], saved: dict[str, Params]) -> DecodeState:
    """Puts a `snapshot` into slots: the same ones roll back, others get a copy, as beams and splits do."""
    gates = jax.tree.map(lambda leaf, rows: leaf.at[_rows(state, slots)].set(rows), state.gates, saved)
    return dataclasses.replace(state, gates=gates)


def _rows(state: DecodeState, slots: Int[Array, "B"]):
    return slots if isinstance(state.gates, list) else (slice(None), slots)
