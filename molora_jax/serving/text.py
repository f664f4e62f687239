"""Text in, text out: an engine with a tokenizer."""

import dataclasses

from molora_jax.engine.engine import Engine
from molora_jax.engine.request import Event, Request
from molora_jax.engine.routed import RoutedEngine
from molora_jax.engine.translating import TranslatingEngine
from molora_jax.text.spelling import Interpreter, SpelledTokens
from molora_jax.text.stream import TextStream
from molora_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Piece:
    """News of one request.

    Attributes:
      request: its number.
      text: what can be shown now; whole characters only, nothing of a stop string.
      tokens, logprobs: the ids behind it and what came before, stop tokens included.
      finished: "stop", "length", or None while it goes on.
      parts: the share of each token in `text`: "" for one that ends no character, or is a stop token.
      trace, writers, adapters, entropy: as in `engine.request.Event`.
    """

    request: int
    text: str
    tokens: list[int]
    logprobs: list[float] | None
    finished: str | None
    parts: list[str]
    trace: list[list[str | None]] | None = None
    writers: list[int] | None = None
    adapters: list[int] | None = None
    entropy: list[float] | None = None


class TextEngine:
    """Turns the events of an engine into text, and ends requests at their stop strings."""

    def __init__(
        self,
        engine: Engine | RoutedEngine | TranslatingEngine,
        tokenizer: Tokenizer,
        interpreter: Interpreter | None = None,
    ):
        """With an `interpreter`, every token is one of its writer's tokenizer."""
        self.engine, self.tokenizer, self.interpreter = engine, tokenizer, interpreter
        self._streams: dict[int, TextStream] = {}

    @property
    def busy(self) -> bool:
        return self.engine.busy

    def submit(self, request: Request, stop_strings: tuple[str, ...] = ()) -> int:
        """Queues a request; the model's own end tokens are added to its stops, where it has one tokenizer."""
        if self.interpreter is None:
            stream = TextStream(self.tokenizer, stop_strings)
            stops = tuple(dict.fromkeys((*request.stops, *self.tokenizer.eos)))
            request = dataclasses.replace(request, stops=stops)
        else:
            stream = TextStream(SpelledTokens(self.interpreter.spellings), stop_strings)
        number = self.engine.submit(request)
        self._streams[number] = stream
        return number

    def step(self) -> list[Piece]:
        """Runs the engine once."""
        pieces = []
        for event in self.engine.step():
            if event.request in self._streams:  # an end at a stop string does not recall what the same step told
                pieces.append(self._piece(event))
        return pieces

    def _piece(self, event: Event) -> Piece:
        stream, finished = self._streams[event.request], event.finished
        ended_by_token = finished == "stop"
        given = event.tokens if self.interpreter is None else list(zip(event.writers, event.tokens, strict=True))
        parts = [stream.push(token) for token in (given[:-1] if ended_by_token else given)]
        if ended_by_token:
            parts.append("")
        if stream.stopped:
            if not finished:
                self.engine.abort(event.request)
            finished = "stop"
        rest = stream.flush() if finished else ""
        if rest and parts:
            parts[-1] += rest
        if finished:
            del self._streams[event.request]
        kept = dict(trace=event.trace, writers=event.writers, adapters=event.adapters, entropy=event.entropy)
        text = "".join(parts) if parts else rest
        return Piece(event.request, text, event.tokens, event.logprobs, finished, parts, **kept)
