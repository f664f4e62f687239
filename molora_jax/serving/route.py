"""Routed generation for a person at a terminal: who wrote what, how much of it, and how quickly."""

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Sequence
from typing import TextIO

import jax
import jax.numpy as jnp
import tqdm

from molora_jax.checkpoints.model import Model
from molora_jax.compilation import counted
from molora_jax.config import UserError
from molora_jax.engine import routed, translating
from molora_jax.engine.experts import Experts
from molora_jax.engine.request import EngineConfig, Rendering, Request
from molora_jax.engine.routed import RoutedEngine
from molora_jax.engine.translating import TranslatingEngine
from molora_jax.routing.program import SMALL
from molora_jax.serving import threshold
from molora_jax.serving.fleet import one_tokenizer
from molora_jax.serving.programs import Routing
from molora_jax.serving.prompts import Prompt
from molora_jax.serving.provenance import Provenance
from molora_jax.serving.terminal import encode, open_lines, say
from molora_jax.serving.text import TextEngine
from molora_jax.text.spelling import Interpreter

CHUNK = 16
"""Tokens of one request that a model reads at once: a hand-off brings few, and a prompt is read once."""


def new_engine(
    models: Sequence[Model],
    routing: Routing,
    requests: Sequence[Request],
    *,
    rows: int,
    max_length: int,
    experts: Experts | None = None,
) -> RoutedEngine | TranslatingEngine:
    """An engine for `requests`, at most `rows` at once, compiled; `experts` are those of a model that is alone.

    Models of different tokenizers run each in a thread, and hand over text.

    Raises:
      UserError: a program that needs one vocabulary, for such models.
    """
    rows = min(rows, len(requests))
    room = min(max_length, *(model.cfg.max_positions for model in models))
    fleet = [routed.Model(model.cfg, model.params, experts and experts.adapters) for model in models]
    if one_tokenizer(models):
        length = min(max(len(each.prompt) + each.max_new_tokens for each in requests), room)
        config = EngineConfig(max_rows=rows, max_length=length, prefill_chunk=CHUNK * rows)
        engine = RoutedEngine(fleet, routing.program, routing.params, config, entropy=True)
    else:
        config = EngineConfig(max_rows=rows, max_length=room, prefill_chunk=CHUNK * rows)
        engine = translated(models, fleet, routing, config)
    with counted() as warm_up:
        engine.warm_up(functools.partial(tqdm.tqdm, desc="compiling", file=sys.stderr, leave=False))
    memory = f"KV {engine.kv_bytes / 2**20:.0f} MiB, {warm_up.programs} programs ready in {warm_up.seconds:.1f} s"
    say(f"{len(models)} models of {_depths(models)} layers on {jax.default_backend()}, {memory}")
    return engine


def translated(
    models: Sequence[Model], fleet: Sequence[routed.Model], routing: Routing, config: EngineConfig
) -> TranslatingEngine:
    """Its threads end with it."""
    own = Interpreter([model.tokenizer for model in models])
    tables = [jnp.asarray(each.transitions) for each in own.spellings]
    texts = dict(interpreter=own, vocabs=[each.vocab for each in own.spellings], transitions=tables)
    return translating.in_threads(fleet, routing.program, routing.params, config, **texts, entropy=True)


def ask(models: Sequence[Model], prompts: Sequence[Prompt], template: Request, routing: Routing) -> list[Request]:
    """The requests that prompts become; prompt i has the template's seed + i, and all have the program's knobs."""
    same = dict(knobs=dict(routing.knobs), stops=models[-1].tokenizer.eos)
    own = lambda i, prompt: dict(prompt=encode(models[-1], prompt), seed=template.seed + i)
    if not one_tokenizer(models):
        render = lambda prompt: tuple(Rendering(encode(model, prompt), model.tokenizer.eos) for model in models)
        own = lambda i, prompt: dict(renderings=render(prompt), seed=template.seed + i)
    return [dataclasses.replace(template, **own(i, prompt), **same) for i, prompt in enumerate(prompts)]


def read_trace(models: Sequence[Model], prompts: Sequence[Prompt], file: str) -> list[int]:
    """The writer of each token of prompt and answer, from the first line that an earlier run wrote to `file`.

    Raises:
      UserError: an unreadable file, one without writers, or several prompts.
    """
    if len(prompts) != 1:
        raise UserError(f"trace: got {len(prompts)} prompts, expected one: a trace is of one answer")
    try:
        with open(file, encoding="utf-8") as lines:
            writers = [int(writer) for writer in json.loads(lines.readline())["writers"]]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"trace: cannot read writers from {file} ({e}), expected what --output writes") from None
    return [SMALL] * len(encode(models[-1], prompts[0])) + writers


def check(models: Sequence[Model], routing: Routing, *, share: float | None, compare: bool) -> None:
    """What can be known to be impossible before anything is compiled.

    Raises:
      UserError: a share or a comparison for models of several tokenizers, whose tokens are not alike; see also
        `threshold.check`.
    """
    several = "got models of several tokenizers, expected one tokenizer"
    if share is not None:
        if not one_tokenizer(models):
            raise UserError(f"share: {several}: set --knob=threshold=…")
        threshold.check(routing.program, share)
    if compare and not one_tokenizer(models):
        raise UserError(f"compare: {several}")


def calibrated(
    engine: RoutedEngine, requests: Sequence[Request], measured: Sequence[Request], share: float
) -> list[Request]:
    """`requests` with the threshold that gives the large model `share` of the tokens of `measured`; it is told.

    Raises:
      UserError: see `threshold.check`.
    """
    chosen = threshold.choose(engine, measured, share)
    answers = f"{len(measured)} answer{'s' * (len(measured) > 1)}"
    say(f"threshold {chosen.threshold:.6g}: with it the large model wrote {chosen.share:.1%} of {answers}")
    knob = dict(threshold=chosen.threshold)
    return [dataclasses.replace(each, knobs={**each.knobs, **knob}) for each in requests]


@dataclasses.dataclass
class _Answer:
    prompt: Prompt
    text: str = ""
    finish: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    parts: list[str] = dataclasses.field(default_factory=list)
    writers: list[int] = dataclasses.field(default_factory=list)
    entropy: list[float] = dataclasses.field(default_factory=list)
    adapters: list[int] = dataclasses.field(default_factory=list)


def generate(
    engine: RoutedEngine | TranslatingEngine,
    models: Sequence[Model],
    prompts: Sequence[Prompt],
    requests: Sequence[Request],
    *,
    stop_strings: tuple[str, ...] = (),
    output: str | None = None,
    colour: bool = False,
) -> list[int]:
    """Runs the requests and prints them with their provenance: one is streamed, several come at the end.

    Args:
      output: file that gets a JSON line for each prompt as soon as it has ended.

    Returns:
      The writer of every token.

    Raises:
      UserError: a request that cannot run; what had ended by then is in `output`.
    """
    own = None if one_tokenizer(models) else Interpreter([model.tokenizer for model in models])
    texts = TextEngine(engine, models[-1].tokenizer, own)
    with open_lines(output) as sink:
        numbers = [texts.submit(request, stop_strings) for request in requests]
        answers = {number: _Answer(prompt) for number, prompt in zip(numbers, prompts, strict=True)}
        paint = Provenance(sys.stdout, len(models), colour=colour)
        begun = time.perf_counter()
        with counted() as later:
            _drive(texts, answers, sink, paint)
        seconds = time.perf_counter() - begun
    writers = [writer for answer in answers.values() for writer in answer.writers]
    print(paint.legend(writers), flush=True)
    say(f"{len(writers) / seconds:.1f} tokens/s, prompts included; {later.programs} programs compiled after warm-up")
    return writers


def _drive(texts: TextEngine, answers: dict[int, _Answer], sink: TextIO | None, paint: Provenance) -> None:
    stream = len(answers) == 1
    bar = tqdm.tqdm(total=len(answers), unit="prompt", file=sys.stderr, disable=stream)
    index = {number: i for i, number in enumerate(answers)}
    while texts.busy:
        for piece in texts.step():
            answer = answers[piece.request]
            answer.text += piece.text
            for name in ("tokens", "parts", "writers", "entropy", "adapters"):
                getattr(answer, name).extend(getattr(piece, name) or [])
            if stream:
                paint.write(piece.parts, piece.writers)
            if piece.finished:
                answer.finish = piece.finished
                bar.update()
                _write(sink, index[piece.request], answer)
    bar.close()
    if stream:
        paint.end()
    elif sink is None:
        for i, answer in enumerate(answers.values()):
            print(f"[{i}]", flush=True)
            paint.write(answer.parts, answer.writers)
            paint.end()


def _write(sink: TextIO | None, index: int, answer: _Answer) -> None:
    if sink is None:
        return
    row = dict(index=index, prompt=answer.prompt.text, text=answer.text, tokens=answer.tokens, finish=answer.finish)
    row |= dict(writers=answer.writers, entropy=answer.entropy)
    if answer.adapters:
        row["adapters"] = answer.adapters
    sink.write(json.dumps(row, ensure_ascii=False) + "\n")
    sink.flush()


def _depths(models: Sequence[Model]) -> str:
    return ", ".join(str(model.cfg.layers) for model in models)
