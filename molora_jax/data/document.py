"""Text to tokens with the weight of each token's loss."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from molora_jax.config import UserError
from molora_jax.data.example import Example
from molora_jax.data.rows import Report, Skip
from molora_jax.text.chat import Message, render
from molora_jax.text.tokenizer import Tokenizer
from molora_jax.typing import Float, Int

T = TypeVar("T", covariant=True)


@dataclasses.dataclass(frozen=True)
class Document:
    """One example as tokens.

    Attributes:
      id: of the example.
      tokens: the whole text, special tokens included.
      weights: of the loss of predicting each token; 0 for the first one, which nothing predicts.
    """

    id: str
    tokens: Int[np.ndarray, "T"]
    weights: Float[np.ndarray, "T"]

    def __len__(self) -> int:
        return len(self.tokens)


class Source(Protocol[T]):
    """Anything that has elements by index, such as a list or `testbed.recipe.Stream`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> T: ...


@dataclasses.dataclass(frozen=True)
class Mapped(Generic[T]):
    """A source whose elements are made when they are asked for.

    Attributes:
      source: where the elements come from.
      convert: what becomes of each.
    """

    source: Source[Any]
    convert: Callable[[Any], T]

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> T:
        return self.convert(self.source[index])


def from_example(tokenizer: Tokenizer, example: Example, *, prompt_weight: float = 0.0) -> Document:
    """The prompt with weight `prompt_weight`, then the completion and the end-of-text token with weight 1.

    The prompt's tokens are those that it has when a model is asked to go on from it.
    """
    return from_pair(tokenizer, example.id, example.prompt, example.completion, prompt_weight=prompt_weight)


def from_pair(tokenizer: Tokenizer, id: str, prompt: str, completion: str, *, prompt_weight: float = 0.0) -> Document:
    """As `from_example`, of texts."""
    before = tokenizer.encode(prompt, special=False)
    together = tokenizer.encode(prompt + completion, special=False)
    # the completion as it continues the prompt; where the two would share a token, by itself
    joins = together[: len(before)] == before
    after = together[len(before) :] if joins else tokenizer.encode(completion, special=False)
    start = [*tokenizer.prefix, *before]
    return _document(id, start + after + [_end(tokenizer)], [prompt_weight] * len(start) + [1.0] * (len(after) + 1))


def from_messages(
    tokenizer: Tokenizer, id: str, messages: Sequence[Message], *, prompt_weight: float = 0.0
) -> Document:
    """A conversation by the tokenizer's chat template: weight 1 for what the assistant writes, its end token included.

    Raises:
      UserError: no assistant message, bad messages, or a template that rewrites earlier turns when more follow.
    """
    tokens, weights, done = [], [], ""
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") != "assistant":
            continue
        before = _rendered(tokenizer, messages[:i], True)
        after = _rendered(tokenizer, messages[: i + 1], False)
        if not (before.startswith(done) and after.startswith(before)):
            raise UserError(f"chat: the template rewrites the turns before message {i}; split the conversation there")
        asked = tokenizer.encode(before[len(done) :], special=False)
        said = tokenizer.encode(after[len(before) :], special=False)
        end = next((at + 1 for at, token in enumerate(said) if token in tokenizer.eos), len(said))
        tokens += asked + said
        weights += [prompt_weight] * len(asked) + [1.0] * end + [0.0] * (len(said) - end)
        done = after
    if not tokens:
        raise UserError("chat: got no assistant message, expected one to learn from")
    return _document(id, tokens, weights)


def _rendered(tokenizer: Tokenizer, messages: Sequence[Message], prompt: bool) -> str:
    names = dict(bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    return render(tokenizer.chat_template, list(messages), **names, add_generation_prompt=prompt)


def _end(tokenizer: Tokenizer) -> int:
    if not tokenizer.eos:
        raise UserError("tokenizer: it names no end-of-text token, expected eos_token in tokenizer_config.json")
    return tokenizer.eos[0]


def _document(id: str, tokens: Sequence[int], weights: Sequence[float]) -> Document:
    weights = np.asarray(weights, np.float32)
    weights[0] = 0.0
    return Document(id, np.asarray(tokens, np.int32), weights)


def fitting(documents: Iterable[Document], length: int, report: Report) -> list[Document]:
    """The documents of at most `length` tokens; the report takes in the others."""
    kept = []
    for document in documents:
        if len(document) <= length:
            kept.append(document)
        else:
            report.skipped.append(Skip(document.id, None, too_long(document, length)))
    report.used += len(kept)
    return kept


def short(tokenizer: Tokenizer, examples: Sequence[Example], length: int, name: str) -> list[Example]:
    """The examples that have at most `length` tokens, worked answer included; prints how many, with their name."""
    found = [example for example in examples if len(from_example(tokenizer, example)) <= length]
    print(f"{name}: {len(found)} of {len(examples)} questions have at most {length} tokens", flush=True)
    return found


def too_long(document: Document, length: int) -> str:
    return f"has {len(document)} tokens, more than the {length} of a row"
