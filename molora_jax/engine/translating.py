"""Continuous batching of requests that a program routes between models whose tokenizers are their own."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from molora_jax.config import UserError
from molora_jax.engine.blueprint import Blueprint, Model, check_adapters
from molora_jax.engine.front import Running
from molora_jax.engine.messages import Entrance, Kind, Message
from molora_jax.engine.request import EngineConfig, Rendering, Request, check, entry
from molora_jax.engine.run import Fleet
from molora_jax.engine.separate import SeparateEngine
from molora_jax.engine.table import Entry, without_drafts
from molora_jax.engine.threads import Threads
from molora_jax.engine.translation import Interpreter, TranslatingSubserver
from molora_jax.routing.characters import WholeCharacters
from molora_jax.routing.program import Program
from molora_jax.typing import Array, Params


class TranslatingEngine(SeparateEngine):
    """As `SeparateEngine`, but every model reads the text in tokens of its own.

    A request has a rendering for each model. Its events tell each token in the ids of its writer, and `max_new_tokens`
    counts them all; it ends, too, when a model has no room for the text: that a tokenizer makes more of it than another
    is not known in advance.
    """

    def submit(self, request: Request) -> int:
        """Queues a request with a rendering for each model.

        Raises:
          UserError: another number of renderings, or as `Front.submit`.
        """
        if len(request.renderings) != len(self.fleet.cfgs):
            got = len(request.renderings)
            raise UserError(f"renderings: got {got}, expected {len(self.fleet.cfgs)}, one for each model's tokenizer")
        for cfg, rendering in zip(self.fleet.cfgs, request.renderings, strict=True):
            check(cfg, self.config, _rendered(request, rendering))
        shortest = min(request.renderings, key=lambda rendering: len(rendering.prompt))
        return super().submit(dataclasses.replace(request, prompt=[0] * len(shortest.prompt), stops=()))

    def _room(self, request: Request) -> int:
        return self.config.max_length

    def _place(self, running: Running, entry: Entry) -> None:
        first = int(entry.row.journey.turn.model)
        number, slot = np.int32(running.id), np.int32(running.guest.slot)
        for i in sorted(range(len(entry.tables)), key=lambda i: i == first):  # whoever runs it first is told last
            row = self._row(running.request, running.request.renderings[i], entry.row.journey)
            self._workers.post(i, Message(Kind.ENTER, Entrance(number, slot, row, np.int32(running.guest.size))))

    def _row(self, request: Request, rendering: Rendering, journey):
        """The request's row in the table of a model."""
        journey = dataclasses.replace(journey, prompt=np.int32(len(rendering.prompt)))
        anchor = [0] * len(self.fleet.cfgs)
        own = entry(self.config, _rendered(request, rendering), anchor=anchor, journey=journey)
        return jax.device_get(without_drafts(own))

    def _ending(self, running: Running, columns: Mapping[str, list]) -> str:
        if not columns["tokens"]:
            return "length"
        stops = running.request.renderings[columns["writers"][-1]].stops
        return "stop" if columns["tokens"][-1] in stops else "length"


def _rendered(request: Request, rendering: Rendering) -> Request:
    return dataclasses.replace(request, prompt=rendering.prompt, stops=rendering.stops)


def in_threads(
    models: Sequence[Model],
    program: Program,
    params: Params | None = None,
    config: EngineConfig = EngineConfig(),
    *,
    interpreter: Interpreter,
    vocabs: Sequence[int],
    transitions: Sequence[Array],
    entropy: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> TranslatingEngine:
    """An engine with a thread per model, given from the quickest to the slowest; arguments as of `RoutedEngine`.

    Args:
      interpreter, vocabs, transitions: what the models' tokenizers make of each other's texts, how many tokens each
        has, and what `WholeCharacters` has to know of them.
      devices: of each model, counted around; by default all there are.

    Raises:
      UserError: a program that needs one vocabulary, experts, and as `SeparateEngine` does.
    """
    check_adapters(models)
    if any(model.adapters is not None for model in models):
        raise UserError("adapters: got experts, expected none: these models have tokenizers of their own")
    own = tuple(min(size, model.cfg.vocab) for size, model in zip(vocabs, models, strict=True))
    fleet = Fleet(tuple(model.cfg for model in models), WholeCharacters(program), own)
    params = dict(inner=params or {}, transitions=tuple(transitions))
    blueprint = Blueprint(fleet, config, tuple(model.dtype for model in models), entropy=entropy)
    devices = devices or jax.devices()
    build = lambda i, model: TranslatingSubserver(i, blueprint, model, params, devices[i % len(devices)], interpreter)
    threads = Threads([functools.partial(build, i, model) for i, model in enumerate(models)])
    return TranslatingEngine(blueprint, params, threads)
