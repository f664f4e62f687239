"""What a routed engine keeps, wherever its models run: the sizes of its table, its memories and their pages."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from molora_jax.config import ModelConfig, UserError
from molora_jax.engine import fused
from molora_jax.engine.experts import Adapters
from molora_jax.engine.fused import Plan
from molora_jax.engine.journey import Departures
from molora_jax.engine.lodging import Lodging, pages_within
from molora_jax.engine.request import EngineConfig
from molora_jax.engine.run import Fleet
from molora_jax.engine.table import Memory, RequestTable, new_memory, new_table
from molora_jax.models.state import kv_rows
from molora_jax.typing import Params


@dataclasses.dataclass(frozen=True)
class Model:
    """One of the models that requests are routed between.

    Attributes:
      adapters: its experts, which the program's decisions index; None if it has none.
    """

    cfg: ModelConfig
    params: Params
    adapters: Adapters | None = None

    @property
    def dtype(self) -> np.dtype:
        return self.params["embed"]["weight"].dtype


def check_adapters(models: Sequence[Model]) -> None:
    """Raises `UserError` for experts that a routed request cannot use."""
    for i, model in enumerate(models):
        if model.adapters is not None and model.adapters.bank.gates:
            raise UserError(
                f"models[{i}]: got experts with gates, expected plain ones: a routed request takes tokens back, which "
                "the state of a gate cannot follow yet"
            )


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """All sizes follow from these fields, so that every part of an engine can work them out for itself.

    Attributes:
      dtypes: of each model's parameters, and so of its KV table.
      experts: whether any model has adapters.
      entropy: whether that of every token's distribution is kept.
      kv_bytes: of the models' KV tables together, if they shall be smaller than all requests could need.
        `config.pages` has one for each model.
      shadow: whether models read the prompts of requests that others run, while they have nothing else to do.
    """

    fleet: Fleet
    config: EngineConfig
    dtypes: tuple[np.dtype, ...]
    experts: bool = False
    entropy: bool = False
    kv_bytes: int | None = None
    shadow: bool = False

    @property
    def chunk(self) -> int:
        """Most prompt tokens that one run reads."""
        return min(self.config.prefill_chunk, self.config.max_length)

    @property
    def length(self) -> int:
        """Positions that a slot has in every memory."""
        return self.config.max_length + len(self.fleet.program.score_tokens)

    @property
    def page_bytes(self) -> list[int]:
        """Size of a page in each model's memory, all layers together."""
        each = zip(self.fleet.cfgs, self.dtypes, strict=True)
        width = lambda cfg, dtype: 2 * cfg.kv_width * np.dtype(dtype).itemsize
        rows = lambda cfg: kv_rows(cfg, (1,) * len(cfg.kinds), self.config.page_size)
        return [rows(cfg) * width(cfg, dtype) for cfg, dtype in each]

    @property
    def pages(self) -> tuple[int, ...]:
        """Of each model. A request may go back by any number of tokens, so that windowed layers keep all pages too."""
        most = self.config.max_rows * -(-self.length // self.config.page_size)
        if self.kv_bytes is not None:
            return pages_within(self.kv_bytes, self.page_bytes, most)
        return self.config.pages or (most,) * len(self.fleet.cfgs)

    def plan(self) -> Plan:
        """All runs of all models."""
        return fused.plan(self.fleet, self.config.max_rows, self.chunk, self.config.block)

    def lodging(self) -> Lodging:
        own = dict(slots=self.config.max_rows, length=self.length, page_size=self.config.page_size)
        return Lodging(self.pages, **own)

    def departures(self, params: Params) -> Departures:
        """`params` are the program's."""
        sizes = dict(length=self.config.max_length, vocab=self.fleet.vocab, dtype=jnp.result_type(*self.dtypes))
        return Departures(self.fleet.program, params, **sizes, entropy=self.entropy)

    def table(self, departures: Departures) -> RequestTable:
        """Free slots."""
        kept = dict(models=len(self.fleet.cfgs), experts=self.experts, journey=departures.empty(self.config.max_rows))
        return new_table(self.config.max_rows, self.config.max_length, **kept)

    def memory(self, model: int) -> Memory:
        """One model's, empty."""
        cfg, count = self.fleet.cfgs[model], self.pages[model]
        own = dict(pages=(count,) * len(cfg.kinds), page_size=self.config.page_size, dtype=self.dtypes[model])
        return new_memory(cfg, self.config.max_rows, self.length, **own)
