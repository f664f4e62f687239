"""What callers ask of an engine, and what they get back."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from molora_jax.config import ModelConfig, UserError
from molora_jax.engine.journey import Journey
from molora_jax.engine.sampling import Sampling
from molora_jax.engine.table import MAX_STOPS, RequestTable


@dataclasses.dataclass(frozen=True)
class Rendering:
    """What a request is to a model whose tokenizer is its own."""

    prompt: Sequence[int]
    stops: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What one caller wants.

    Attributes:
      prompt: token ids, at least one.
      max_new_tokens: most tokens to give.
      temperature, top_k, top_p, min_p: see `sampling.Sampling`.
      seed: the same seed gives the same tokens in any batch.
      stops: token ids that end the request; the one that did is the last token given.
      logprobs: whether to return the log-probability of each token.
      tempered: whether it is that at the request's temperature; otherwise it is that at 1, as at 0.
      adapter: name of the expert of all tokens; None leaves it to the engine's rule or router, or is the base.
      route: name of each token's expert, from the first on (None: the base); later tokens go on with the last, or as
        the engine's rule says.
      knobs: of the routing program, by name, where they differ from its own.
      renderings: of an engine whose models have tokenizers of their own, what `prompt` and `stops` are to each.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stops: tuple[int, ...] = ()
    logprobs: bool = False
    tempered: bool = False
    adapter: str | None = None
    route: Sequence[str | None] | None = None
    knobs: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    renderings: tuple[Rendering, ...] = ()

    @property
    def logprob_at(self) -> float:
        """The temperature of the log-probabilities to return; 0 for none."""
        return float(self.logprobs) * (self.tempered and self.temperature or 1.0)


@dataclasses.dataclass(frozen=True)
class Event:
    """News of one request.

    Attributes:
      request: its number.
      tokens: those it was given.
      logprobs: theirs, where asked for.
      finished: "stop", "length", or None while it goes on.
      trace: at the end, of an engine that records it: the names of the experts that each token read, prompt first,
        used in each layer (and at each site, for a router that decides there): [tokens][choices], None the base.
      writers: of a routed engine, the model that wrote each token.
      adapters: the adapter that each was read with, where the models have any (-1: none).
      entropy: of the distribution that each was drawn from, in nats, where that is kept.
    """

    request: int
    tokens: list[int]
    logprobs: list[float] | None
    finished: str | None
    trace: list[list[str | None]] | None = None
    writers: list[int] | None = None
    adapters: list[int] | None = None
    entropy: list[float] | None = None


@dataclasses.dataclass
class Usage:
    """What an engine has done so far.

    Attributes:
      prefill_tokens, decode_tokens: prompt tokens read (shared ones apart), and tokens given by decoding.
      prefill_seconds, decode_seconds: spent in programs of either kind.
      decode_steps: times the model ran to decode, whatever the number of rows.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    decode_steps: int = 0

    def __str__(self) -> str:
        rate = lambda tokens, seconds: f"{tokens} tokens, {tokens / seconds:.1f} tokens/s" if tokens else "no tokens"
        prefill = rate(self.prefill_tokens, self.prefill_seconds)
        return f"prefill {prefill} · decode {rate(self.decode_tokens, self.decode_seconds)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes that are fixed at creation.

    Attributes:
      max_rows: requests that run at once.
      max_length: longest prompt and continuation together, in tokens.
      page_size: token rows of a KV page.
      prefill_chunk: most prompt tokens that one program reads.
      block: most tokens a row is given by one program, that is, between two looks of the host.
      pages: per kind of layer; by default enough for `max_rows` requests of `max_length`.
      trace: whether to record the experts that each token used.
    """

    max_rows: int = 8
    max_length: int = 2048
    page_size: int = 16
    prefill_chunk: int = 512
    block: int = 16
    pages: tuple[int, ...] | None = None
    trace: bool = False


def check_sizes(config: EngineConfig) -> None:
    """Raises `UserError` on sizes that cannot be."""
    for name in ("max_rows", "max_length", "page_size", "prefill_chunk", "block"):
        if (value := getattr(config, name)) < 1:
            raise UserError(f"{dict(max_rows='batch_size').get(name, name)}: got {value}, expected at least 1")


def check(cfg: ModelConfig, config: EngineConfig, request: Request) -> None:
    """Raises `UserError` for a request that cannot run."""
    prompt, most = request.prompt, config.max_length
    if len(prompt) < 1:
        raise UserError("prompt: got no tokens, expected at least one")
    if min(prompt) < 0 or max(prompt) >= cfg.vocab:
        raise UserError(f"prompt: got token ids {min(prompt)} to {max(prompt)}, expected 0 to {cfg.vocab - 1}")
    if len(prompt) + request.max_new_tokens > most:
        raise UserError(
            f"prompt: got {len(prompt)} tokens and {request.max_new_tokens} to generate, expected at most {most}"
            " together: raise --max_length or shorten either"
        )
    ranges = dict(temperature=(0, 100), top_k=(0, cfg.vocab), min_p=(0, 1), max_new_tokens=(1, most))
    for name, (low, high) in ranges.items():
        value = getattr(request, name)
        if not low <= value <= high:
            raise UserError(f"{name}: got {value}, expected {low} to {high}")
    if not 0 < request.top_p <= 1:
        raise UserError(f"top_p: got {request.top_p}, expected above 0 and at most 1")
    if not 0 <= request.seed < 2**32:
        raise UserError(f"seed: got {request.seed}, expected 0 to {2**32 - 1}")
    if len(request.stops) > MAX_STOPS:
        raise UserError(f"stops: got {len(request.stops)} stop tokens, expected at most {MAX_STOPS}")


def entry(
    config: EngineConfig,
    request: Request,
    *,
    anchor: Sequence[int],
    experts: np.ndarray | None = None,
    traced: int = 0,
    journey: Journey | None = None,
) -> RequestTable:
    """The row of the request table that `request` becomes; `anchor[m]` of its tokens have been read by model m."""
    prompt = np.zeros(config.max_length, np.int32)
    prompt[: len(request.prompt)] = request.prompt
    stops = np.full(MAX_STOPS, -1, np.int32)
    stops[: len(request.stops)] = request.stops
    return RequestTable(
        tokens=prompt,
        length=np.int32(len(request.prompt)),
        limit=np.int32(len(request.prompt) + request.max_new_tokens),
        active=np.bool_(True),
        anchor=np.asarray(anchor, np.int32),
        sampling=Sampling(
            np.float32(request.temperature),
            np.int32(request.top_k),
            np.float32(request.top_p),
            np.float32(request.min_p),
            np.uint32(request.seed),
        ),
        stops=stops,
        logprobs=np.zeros(config.max_length, np.float32),
        logprob_at=np.float32(request.logprob_at),
        experts=experts,
        trace=np.zeros((config.max_length, traced), np.int16) if traced else None,
        journey=journey,
    )


class Runs(Protocol):
    """Any engine."""

    def submit(self, request: Request) -> int: ...

    def step(self) -> list[Event]: ...

    def abort(self, number: int) -> None: ...


def run_all(engine: Runs, requests: Sequence[Request]) -> list[Event]:
    """Runs requests to their ends: one event each, in their order, with all that they were given.

    None is left behind if one is refused, or if the call is interrupted.
    """
    parts: dict[int, list[Event]] = {}
    try:
        for request in requests:
            parts[engine.submit(request)] = []
        running = set(parts)
        while running:
            for event in engine.step():
                if event.request in parts:
                    parts[event.request].append(event)
                if event.finished:
                    running.discard(event.request)
    except BaseException:
        for number in parts:
            engine.abort(number)
        raise
    return [_joined(own) for own in parts.values()]


def _joined(parts: Sequence[Event]) -> Event:
    whole = {}
    for name in ("tokens", "logprobs", "writers", "adapters", "entropy"):
        columns = [getattr(part, name) for part in parts]
        whole[name] = None if None in columns else [value for column in columns for value in column]
    return dataclasses.replace(parts[-1], **whole)
