"""Generation for a person at a terminal: prompts from files, streamed text, progress, JSON lines."""

import contextlib
import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import TextIO

import jax
import tqdm

from molora_jax.checkpoints.model import Model
from molora_jax.compilation import counted
from molora_jax.config import UserError
from molora_jax.engine.engine import Engine
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.serving.text import TextEngine
from molora_jax.text import chat

Prompt = str | list[chat.Message]
"""Plain text, or the messages of a conversation."""


def read_prompts(texts: list[str], file: str | None, *, chat: bool, system: str | None) -> list[Prompt]:
    """Prompts from the command line and from a file: text with one a line, or .jsonl with `prompt` or `messages`.

    Raises:
      UserError: no prompt at all, an unreadable file or a malformed line, with its number.
    """
    prompts: list[Prompt] = list(texts)
    if file:
        prompts += _read_file(pathlib.Path(file))
    if not prompts:
        raise UserError("prompt: got none, expected --prompt or --prompts_file")
    if not chat:
        return prompts
    lead = [{"role": "system", "content": system}] if system else []
    return [[*lead, {"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts]


def _read_file(path: pathlib.Path) -> list[Prompt]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"prompts_file: cannot read {path}: {e}") from None
    if path.suffix != ".jsonl":
        return [line for line in lines if line.strip()]
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompts.append(row["messages"] if "messages" in row else row["prompt"])
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f'prompts_file: line {number} of {path} is {line!r:.60}, expected {{"prompt": …}} or {{"messages": …}}'
            ) from None
    return prompts


def generate(
    model: Model,
    prompts: list[Prompt],
    template: Request,
    *,
    stop_strings: tuple[str, ...] = (),
    rows: int,
    max_length: int,
    output: str | None = None,
) -> None:
    """Generates for every prompt and prints: one prompt is streamed, several show progress, then their texts.

    Args:
      template: how to continue every prompt; prompt i has the template's seed + i.
      output: file that gets a JSON line for each prompt as soon as it has ended.

    Raises:
      UserError: a prompt or a setting that cannot run; what had ended by then is in `output`.
    """
    rows = min(rows, len(prompts))
    config = EngineConfig(max_rows=rows, max_length=min(max_length, model.cfg.max_positions))
    requests = [
        dataclasses.replace(template, prompt=encode(model, prompt), seed=template.seed + i)
        for i, prompt in enumerate(prompts)
    ]
    with _open(output) as sink:
        engine = Engine(model.cfg, model.params, config)
        texts = TextEngine(engine, model.tokenizer)
        numbers = [texts.submit(request, stop_strings) for request in requests]  # a wrong one ends here, at once
        _say(f"{model.cfg.family} on {jax.default_backend()}, KV {engine.kv_bytes / 2**20:.0f} MiB")
        with counted() as warm_up:
            engine.warm_up(functools.partial(tqdm.tqdm, desc="compiling", file=sys.stderr, leave=False))
        with counted() as later:
            _drive(texts, dict(zip(numbers, prompts, strict=True)), sink)
    slots = engine.slots
    _say(f"{engine.usage} · KV pages shared {slots.hits}/{slots.looked_up}")
    _say(f"{warm_up.programs} programs ready in {warm_up.seconds:.1f} s, {later.programs} compiled after warm-up")


def encode(model: Model, prompt: Prompt) -> list[int]:
    """Token ids of a prompt; a conversation goes through the model's chat template."""
    tokenizer = model.tokenizer
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    tokens = dict(bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    return tokenizer.encode(chat.render(tokenizer.chat_template, prompt, **tokens), special=False)


@dataclasses.dataclass
class _Answer:
    prompt: Prompt
    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)


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
                _write(sink, index[piece.request], answer, piece.finished)
    bar.close()
    if stream:
        print(flush=True)
    elif sink is None:
        for i, answer in enumerate(answers.values()):
            print(f"[{i}] {answer.text}", flush=True)


def _write(sink: TextIO | None, index: int, answer: _Answer, finished: str) -> None:
    if sink is None:
        return
    row = dict(index=index, prompt=answer.prompt, text=answer.text, tokens=answer.tokens, finish=finished)
    if answer.logprobs:
        row["logprobs"] = answer.logprobs
    sink.write(json.dumps(row, ensure_ascii=False) + "\n")
    sink.flush()


@contextlib.contextmanager
def _open(path: str | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    try:
        sink = open(path, "w", encoding="utf-8")  # noqa: SIM115
    except OSError as e:
        raise UserError(f"output: cannot write {path}: {e.strerror}; name another file") from None
    with sink:
        yield sink


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
