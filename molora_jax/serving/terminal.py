"""Generation for a person at a terminal: streamed text, progress, JSON lines."""

import contextlib
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Iterator
from typing import TextIO

import jax
import tqdm

from molora_jax.checkpoints.model import Model
from molora_jax.compilation import counted
from molora_jax.config import UserError
from molora_jax.engine.engine import Engine
from molora_jax.engine.experts import Experts
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.serving.prompts import Prompt
from molora_jax.serving.text import TextEngine
from molora_jax.text import chat


def generate(
    model: Model,
    prompts: list[Prompt],
    template: Request,
    *,
    stop_strings: tuple[str, ...] = (),
    rows: int,
    max_length: int,
    output: str | None = None,
    experts: Experts | None = None,
    trace: bool = False,
) -> None:
    """Generates for every prompt and prints: one prompt is streamed, several show progress, then their texts.

    Args:
      template: how to continue every prompt; prompt i has the template's seed + i.
      output: file that gets a JSON line for each prompt as soon as it has ended.
      experts: adapters that the prompts may name, or that a rule or a router gives their tokens.
      trace: also tell which expert each token used.

    Raises:
      UserError: a prompt or a setting that cannot run; what had ended by then is in `output`.
    """
    rows = min(rows, len(prompts))
    config = EngineConfig(max_rows=rows, max_length=min(max_length, model.cfg.max_positions), trace=trace)
    requests = []
    for i, prompt in enumerate(prompts):
        who = dict(adapter=prompt.adapter, route=prompt.route)
        requests.append(dataclasses.replace(template, prompt=encode(model, prompt), seed=template.seed + i, **who))
    with open_lines(output) as sink:
        engine = Engine(model.cfg, model.params, config, experts)
        texts = TextEngine(engine, model.tokenizer)
        numbers = [texts.submit(request, stop_strings) for request in requests]  # a wrong one ends here, at once
        say(f"{model.cfg.family} on {jax.default_backend()}, KV {engine.kv_bytes / 2**20:.0f} MiB")
        if experts:
            library = experts.library
            say(f"{len(library.names)} experts, bank of {library.spec.slots} slots, {library.bytes / 2**20:.1f} MiB")
        with counted() as warm_up:
            engine.warm_up(functools.partial(tqdm.tqdm, desc="compiling", file=sys.stderr, leave=False))
        with counted() as later:
            _drive(texts, dict(zip(numbers, prompts, strict=True)), sink)
    slots = engine.slots
    say(f"{engine.usage} · KV pages shared {slots.hits}/{slots.looked_up}")
    say(f"{warm_up.programs} programs ready in {warm_up.seconds:.1f} s, {later.programs} compiled after warm-up")


def encode(model: Model, prompt: Prompt) -> list[int]:
    """Token ids of a prompt; a conversation goes through the model's chat template."""
    tokenizer = model.tokenizer
    if isinstance(prompt.text, str):
        return tokenizer.encode(prompt.text)
    tokens = dict(bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    return tokenizer.encode(chat.render(tokenizer.chat_template, prompt.text, **tokens), special=False)


@dataclasses.dataclass
class _Answer:
    prompt: Prompt
    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    trace: list[list[str | None]] | None = None


def _drive(texts: TextEngine, prompts: dict[int, Prompt], sink: TextIO | None) -> None:
    answers = {number: _Answer(prompt) for number, prompt in prompts.items()}
    stream = len(answers) == 1
    bar = tqdm.tqdm(total=len(answers), unit="prompt", file=sys.stderr, disable=stream)
    index = {number: i for i, number in enumerate(answers)}
    while texts.busy:
        for piece in texts.step():
            answer = answers[piece.request]
            answer.text += piece.text
            answer.tokens += piece.tokens
            answer.logprobs += piece.logprobs or []
            if stream:
                print(piece.text, end="", flush=True)
            if piece.finished:
                bar.update()
                answer.trace = piece.trace
                _write(sink, index[piece.request], answer, piece.finished)
    bar.close()
    if stream:
        print(flush=True)
    for i, answer in enumerate(answers.values()):
        if not stream and sink is None:
            print(f"[{i}] {answer.text}", flush=True)
        if answer.trace and sink is None:
            print(f"[{i}] experts: {_runs(answer.trace)}", flush=True)


def _runs(trace: list[list[str | None]]) -> str:
    """A trace in short: how many tokens in a row used what, "base" or "a/b" where the layers differ."""
    names = ["/".join(sorted({name or "base" for name in choices})) for choices in trace]
    return ", ".join(f"{name} × {len(list(run))}" for name, run in itertools.groupby(names))


def _write(sink: TextIO | None, index: int, answer: _Answer, finished: str) -> None:
    if sink is None:
        return
    row = dict(index=index, prompt=answer.prompt.text, text=answer.text, tokens=answer.tokens, finish=finished)
    extra = dict(adapter=answer.prompt.adapter, logprobs=answer.logprobs, route=answer.trace)
    row |= {name: value for name, value in extra.items() if value}
    sink.write(json.dumps(row, ensure_ascii=False) + "\n")
    sink.flush()


@contextlib.contextmanager
def open_lines(path: str | None) -> Iterator[TextIO | None]:
    """The file to write JSON lines to, None without a path."""
    if path is None:
        yield None
        return
    try:
        sink = open(path, "w", encoding="utf-8")  # noqa: SIM115
    except OSError as e:
        raise UserError(f"output: cannot write {path}: {e.strerror}; name another file") from None
    with sink:
        yield sink


def say(line: str) -> None:
    """Tells what is going on, apart from what was asked for."""
    print(line, file=sys.stderr, flush=True)
