"""Routed decoding beside its ends: the same requests by the large model alone, by the small one alone, and by both."""

import dataclasses
from collections.abc import Mapping, Sequence

from molora_jax.checkpoints.model import Model
from molora_jax.engine.engine import Engine
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.engine.routed import RoutedEngine


@dataclasses.dataclass
class Contender:
    """One way to answer; a call does it.

    Attributes:
      tokens: how many the last call gave, all requests together.
    """

    engine: Engine | RoutedEngine
    requests: Sequence[Request]
    tokens: int = 0

    def __call__(self) -> None:
        self.tokens = sum(len(event.tokens) for event in self.engine.run(self.requests))


def contenders(models: Sequence[Model], engine: RoutedEngine, requests: Sequence[Request]) -> dict[str, Contender]:
    """The large model alone, the small one alone, and `engine`: compiled, and nobody remembers a prompt.

    Stop tokens stop nobody, so that all write equally many.
    """
    routed = [dataclasses.replace(request, stops=()) for request in requests]
    plain = [dataclasses.replace(request, knobs={}) for request in routed]
    length = engine.config.max_length
    # a page as long as a request is never full, and only full pages are kept for the next request that begins alike
    sizes = dict(max_rows=engine.config.max_rows, max_length=length, page_size=length)
    config = EngineConfig(prefill_chunk=engine.config.prefill_chunk, **sizes)
    found = {}
    for name, model in {"large only": models[-1], "small only": models[0]}.items():
        found[name] = Contender(Engine(model.cfg, model.params, config), plain)
        found[name].engine.warm_up()
    return {**found, "routed": Contender(engine, routed)}


def table(found: Mapping[str, Contender], seconds: Mapping[str, float]) -> str:
    """Tokens per second of each, prompts included, and over the large model's."""
    rates = {name: each.tokens / seconds[name] for name, each in found.items()}
    first = next(iter(rates.values()))
    lines = [f"{name:<12}{rate:8.1f} tokens/s {rate / first:6.2f} ×" for name, rate in rates.items()]
    return "\n".join(lines)
