"""Labels for routers: which tokens of the small model would lead the large model's answers astray (R2R)."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.checkpoints.model import Model
from molora_jax.config import ModelConfig, UserError
from molora_jax.data.example import Example
from molora_jax.data.tasks import registry
from molora_jax.engine.engine import Engine
from molora_jax.engine.request import EngineConfig, Request
from molora_jax.models import transformer
from molora_jax.nn.layout import dense
from molora_jax.text.tokenizer import Tokenizer
from molora_jax.typing import Array, Bool, Float, Int, Params

IDENTICAL, NEUTRAL, DIVERGENT = 0, 1, 2
"""Of the small model's token: it is the large one's; it is another, but the answer stays right; it does not."""


@dataclasses.dataclass(frozen=True)
class Labels:
    """N tokens that the small model would write along the large one's answers, and what they would lead to.

    Attributes:
      hidden: the small model's last hidden state, that the token is written from.
      token: its greedy choice.
      top_logits: its k highest raw logits, descending.
      kind: `IDENTICAL`, `NEUTRAL` or `DIVERGENT`.
      question: number of the example among those that were given.
    """

    hidden: Float[np.ndarray, "N D"]
    token: Int[np.ndarray, "N"]
    top_logits: Float[np.ndarray, "N k"]
    kind: Int[np.ndarray, "N"]
    question: Int[np.ndarray, "N"]

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def divergent(self) -> Bool[np.ndarray, "N"]:
        return self.kind == DIVERGENT

    def at(self, rows: Int[np.ndarray, "n"] | Bool[np.ndarray, "N"]) -> "Labels":
        """Some of them."""
        return Labels(**{name: column[rows] for name, column in vars(self).items()})


@dataclasses.dataclass(frozen=True)
class _Path:
    """The prompt of example number `question`, and an answer, stop token included, that the small model shall read."""

    question: int
    prompt: list[int]
    answer: list[int]


def label(
    small: Model, large: Model, examples: Sequence[Example], *, top_k: int, rows: int = 64, length: int = 128
) -> Labels:
    """Labels the tokens of the large model's answers (Fu et al. 2025, arXiv 2505.21600, §3 and alg. 1).

    As there: the large model answers; the small one reads the answers, and where its greedy token is another, the large
    one goes on from it; the difference is neutral if what comes of it is as good, and divergent if not. Other than
    there, the large model goes on to the end of the answer instead of the end of the sentence, and the task's verifier
    judges instead of a third model: the continuation from the large model's own token is the answer itself, which was
    found right. Answers that are wrong or not finished are left out, for nothing tells what led them astray.

    Args:
      top_k: k of the logits that are kept.
      rows: answers that run at once.
      length: most tokens of a prompt and its answer.

    Raises:
      UserError: the large model answers no example rightly.
    """
    engine = Engine(large.cfg, large.params, EngineConfig(max_rows=rows, max_length=length, block=length))
    paths = _paths(engine, large.tokenizer, examples)
    if not paths:
        raise UserError(f"labels: got no right answer of the large model to {len(examples)} questions, expected some")
    found = _read(small, paths, top_k=top_k, rows=rows, length=length)
    wanted = np.concatenate([path.answer for path in paths])
    place = np.concatenate([np.arange(len(path.answer)) for path in paths])
    owner = np.repeat(np.arange(len(paths)), [len(path.answer) for path in paths])
    other = np.flatnonzero(found["token"] != wanted)
    starts = [(paths[owner[i]], place[i], int(found["token"][i])) for i in other]
    kind = np.full(len(wanted), IDENTICAL)
    kind[other] = np.where(_harmless(engine, large.tokenizer, examples, starts), NEUTRAL, DIVERGENT)
    return Labels(**found, kind=kind, question=np.array([path.question for path in paths])[owner])


def label_questions(
    small: Model,
    examples: Sequence[Example],
    right: Bool[np.ndarray, "n"],
    *,
    top_k: int,
    rows: int = 64,
    length: int = 128,
) -> Labels:
    """One label a question, for a router that decides once: `DIVERGENT` where the small model's own answer is wrong.

    The features are those of the answer's first token, before which the small model has read the whole prompt.

    Args:
      right: whether the small model answers each of the questions rightly.
    """
    paths = [_Path(i, small.tokenizer.encode(example.prompt), [0]) for i, example in enumerate(examples)]
    kind = np.where(right, IDENTICAL, DIVERGENT)
    found = _read(small, paths, top_k=top_k, rows=rows, length=length)
    return Labels(**found, kind=kind, question=np.arange(len(examples)))


def _paths(engine: Engine, tokenizer: Tokenizer, examples: Sequence[Example]) -> list[_Path]:
    """The large model's answers that ended by themselves and are right."""
    prompts = [tokenizer.encode(example.prompt) for example in examples]
    events = engine.run([_request(engine, tokenizer, prompt) for prompt in prompts])
    right = registry.verify(examples, [tokenizer.decode(event.tokens) for event in events])
    return [
        _Path(i, prompts[i], event.tokens) for i, event in enumerate(events) if right[i] and event.finished == "stop"
    ]


def _read(small: Model, paths: Sequence[_Path], *, top_k: int, rows: int, length: int) -> dict[str, np.ndarray]:
    """What the small model makes of each token of the answers, before it sees it; `rows` answers a pass."""
    parts = []
    for first in range(0, len(paths), rows):
        tokens, asked = np.zeros((rows, length), np.int32), np.zeros((rows, length), bool)
        valid = np.zeros((rows, length), bool)
        for row, path in enumerate(paths[first : first + rows]):
            start, stop = len(path.prompt), len(path.prompt) + len(path.answer)
            tokens[row, :stop], valid[row, :stop] = path.prompt + path.answer, True
            asked[row, start - 1 : stop - 1] = True
        features = _features(small.cfg, top_k, small.params, tokens, valid)
        parts.append({name: np.asarray(column)[asked.reshape(-1)] for name, column in features.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _features(
    cfg: ModelConfig, top_k: int, params: Params, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"]
) -> dict[str, Array]:
    """Of each position, what is known of the token after it."""
    hidden = transformer.apply(cfg, params, tokens.reshape(-1), dense(*tokens.shape, valid=valid)).hidden
    values, ids = jax.lax.top_k(transformer.logits(cfg, params, hidden), top_k)
    return dict(hidden=hidden.astype(jnp.float32), token=ids[:, 0], top_logits=values)


def _harmless(
    engine: Engine, tokenizer: Tokenizer, examples: Sequence[Example], starts: Sequence[tuple[_Path, int, int]]
) -> list[bool]:
    """Whether the answer stays right if token number `place` of a path is another, and the large model goes on."""
    written = [[*path.answer[:place], token] for path, place, token in starts]
    prefixes = [[*path.prompt, *text] for (path, _, _), text in zip(starts, written, strict=True)]
    open_ends = [
        i
        for i, prefix in enumerate(prefixes)
        if prefix[-1] not in tokenizer.eos and len(prefix) < engine.config.max_length
    ]
    events = engine.run([_request(engine, tokenizer, prefixes[i]) for i in open_ends])
    for i, event in zip(open_ends, events, strict=True):
        written[i] += event.tokens
    asked = [examples[path.question] for path, _, _ in starts]
    return registry.verify(asked, [tokenizer.decode(tokens) for tokens in written])


def _request(engine: Engine, tokenizer: Tokenizer, prefix: Sequence[int]) -> Request:
    return Request(prompt=prefix, max_new_tokens=engine.config.max_length - len(prefix), stops=tokenizer.eos)
