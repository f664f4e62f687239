"""Chat messages to one text, by a model's Jinja template."""

import datetime
import functools
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from molora_jax.config import UserError

Message = dict[str, Any]


def render(
    template: str | None,
    messages: list[Message],
    *,
    bos_token: str | None,
    eos_token: str | None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The text that a model was trained to see for a conversation.

    The template writes the special tokens itself: encode the result with `Tokenizer.encode(text, special=False)`.
    It is foreign code and runs in Jinja's sandbox.

    Args:
      template: Jinja source, `Tokenizer.chat_template`.
      messages: each with a `role` and `content` (or `tool_calls`); keys whose value is None count as absent.
      bos_token, eos_token: texts of these tokens, None where the model has none.
      add_generation_prompt: end with the opening of the assistant's answer.
      variables: whatever else the template reads, such as `tools` or `enable_thinking`.

    Raises:
      UserError: no template, a bad template, bad messages, or a conversation that the template refuses.
    """
    if template is None:
        raise UserError(
            "chat: the model has no chat template; send it plain text, or load its instruction-tuned version"
        )
    values: dict[str, Any] = dict(tools=None, documents=None)
    values |= {k: v for k, v in dict(bos_token=bos_token, eos_token=eos_token).items() if v is not None}
    values |= dict(messages=_checked(messages), add_generation_prompt=add_generation_prompt) | variables
    compiled = _compiled(template)
    try:
        return compiled.render(values)
    except Exception as e:  # a template may fail as any program may
        raise UserError(f"chat: the model's template does not take these messages: {_line(e)}") from None


def _checked(messages: list[Message]) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        got = "an empty list" if messages == [] else f"something of type {type(messages).__name__}"
        raise UserError(f"chat: got {got}, expected a list of messages such as [{{'role': 'user', 'content': 'Hi'}}]")
    for i, message in enumerate(messages):
        valid = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not valid or ("content" not in message and "tool_calls" not in message):
            raise UserError(f"chat: message {i} is {message!r:.80}, expected {{'role': 'user', 'content': 'text'}}")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise UserError(f"chat: the content of message {i} is of type {type(content).__name__}, expected a string")
    return [{k: v for k, v in message.items() if v is not None} for message in messages]


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as e:
        raise UserError(f"chat: the model's template is not valid Jinja, line {e.lineno}: {_line(e)}") from None


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The dialect in which HF models write their templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training masks; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Plain JSON; Jinja's own filter escapes HTML, which the models have not seen in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
