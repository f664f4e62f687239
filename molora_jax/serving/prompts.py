"""Prompts from the command line and from files, each with the experts that it asks for."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

from molora_jax.config import UserError
from molora_jax.text.chat import Message

Text = str | list[Message]
"""Plain text, or the messages of a conversation."""

ROW = '{"prompt": …} or {"messages": …}, with "adapter": name or "route": [names] if need be'


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What one row of a batch begins with.

    Attributes:
      text: to continue.
      adapter, route: see `engine.request.Request`.
    """

    text: Text
    adapter: str | None = None
    route: tuple[str | None, ...] | None = None


def read_prompts(
    texts: Sequence[str], file: str | None, *, chat: bool, system: str | None, adapters: Sequence[str] = ()
) -> list[Prompt]:
    """Prompts from the command line and from a file: text with one a line, or .jsonl.

    Args:
      adapters: of the prompts in their order; one alone is everybody's, and the base's name is "base".

    Raises:
      UserError: no prompt at all, an unreadable file or a malformed line, with its number, or another number of
        adapters than of prompts.
    """
    prompts = [Prompt(text) for text in texts]
    if file:
        prompts += _read_file(pathlib.Path(file))
    if not prompts:
        raise UserError("prompt: got none, expected --prompt or --prompts_file")
    if adapters:
        if len(adapters) not in (1, len(prompts)):
            raise UserError(f"adapter: got {len(adapters)} for {len(prompts)} prompts, expected one, or one for each")
        names = [None if name == "base" else name for name in adapters] * (len(prompts) if len(adapters) == 1 else 1)
        prompts = [dataclasses.replace(p, adapter=name) for p, name in zip(prompts, names, strict=True)]
    if system and not chat:
        raise UserError("system: got a message without a chat, expected --chat with --system")
    if not chat:
        return prompts
    lead = [{"role": "system", "content": system}] if system else []
    turns = lambda text: [*lead, {"role": "user", "content": text}] if isinstance(text, str) else text
    return [dataclasses.replace(prompt, text=turns(prompt.text)) for prompt in prompts]


def _read_file(path: pathlib.Path) -> list[Prompt]:
    try:
        lines = path.read_text("utf-8-sig").split("\n")  # a prompt may hold other ends of lines
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"prompts_file: cannot read {path}: {e}") from None
    if path.suffix != ".jsonl":
        return [Prompt(line) for line in lines if line.strip()]
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row["messages"] if "messages" in row else row["prompt"]
            route = row.get("route")
            prompts.append(Prompt(text, row.get("adapter"), None if route is None else _names(route)))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"prompts_file: line {number} of {path} is {line!r:.60}, expected {ROW}") from None
    return prompts


def _names(route: list) -> tuple[str | None, ...]:
    """One name a token; a recorded trace may repeat it for every layer."""
    names = [set(choice) if isinstance(choice, list) else {choice} for choice in route]
    if any(len(choice) != 1 for choice in names):
        raise ValueError
    return tuple(choice.pop() for choice in names)
