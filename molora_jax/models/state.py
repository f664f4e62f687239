"""What a model remembers of its requests between two calls."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from molora_jax.config import ModelConfig
from molora_jax.nn.attention import KVTable


@functools.partial(jax.tree_util.register_dataclass, data_fields=["kv"], meta_fields=["pages", "page_size"])
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The KV table and its geometry. Passed in, returned, donated.

    Attributes:
      kv: the rows of all layers.
      pages: how many pages a layer of each kind has (`ModelConfig.kinds`).
      page_size: token rows of a page.
    """

    kv: KVTable
    pages: tuple[int, ...]
    page_size: int

    def bases(self, cfg: ModelConfig) -> tuple[int, ...]:
        """Per layer, the first row of its share of the table."""
        bases, row = [], 0
        for kind in cfg.kind_of_layer:
            bases.append(row)
            row += self.pages[kind] * self.page_size
        return tuple(bases)


def kv_rows(cfg: ModelConfig, pages: tuple[int, ...], page_size: int) -> int:
    """Rows that the KV table of a model has."""
    return sum(pages[kind] * page_size for kind in cfg.kind_of_layer)


def new_state(cfg: ModelConfig, *, pages: tuple[int, ...], page_size: int, dtype=jnp.float32) -> DecodeState:
    """A zeroed state with `pages[k]` pages for every layer of kind k."""
    shape = (kv_rows(cfg, pages, page_size), 2 * cfg.kv_width)
    return DecodeState(KVTable(jnp.zeros(shape, dtype)), pages, page_size)
