"""Evidence by what the words of a question attend to in a frozen model that reads all segments at once."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.config import ModelConfig, UserError
from molora_jax.data.multihop.question import Question
from molora_jax.models import transformer
from molora_jax.nn.layout import dense
from molora_jax.retrieval import baselines, slates
from molora_jax.text.tokenizer import Tokenizer
from molora_jax.typing import Array, Float, Int, Params

TOKENS, WORDS, SEGMENTS = 512, 32, 32
"""Of which a program's sizes are multiples: tokens of a prompt, tokens of its question, segments."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Which heads of which layers rank.

    Attributes:
      layers: the first so many are run.
      heads: that count, the best of them all on other questions.
      longest: tokens of a segment; the rest of it is cut.
    """

    layers: int = 16
    heads: int = 8
    longest: int = 96

    def __post_init__(self):
        if min(self.layers, self.heads, self.longest) < 1:
            raise UserError(f"attention: got {self}, expected positive numbers")


class AttentionRanker:
    """Scores a segment by the attention that a question behind all segments pays it (QRHead: Zhang et al. 2025, §3).

    Nothing is trained: the heads are chosen by the attention that they pay to the evidence of some questions.

    Args:
      params: of the bare base.

    Attributes:
      heads: (layers, heads) of the chosen ones; none before `choose`.
      tokens: that were run so far, each through all of the config's layers.
    """

    def __init__(self, cfg: ModelConfig, params: Params, tokenizer: Tokenizer, config: AttentionConfig):
        if config.layers > cfg.layers or config.heads > config.layers * cfg.heads:
            most = f"at most {cfg.layers} layers and their heads, {cfg.heads} in each"
            raise UserError(f"attention: got {config.layers} layers and {config.heads} heads, expected {most}")
        self.config, self.heads, self.tokens = config, None, 0
        self._cfg, self._params, self._tokenizer = cfg, params, tokenizer

    def choose(self, questions: Sequence[Question]) -> None:
        """Keeps the heads that pay most attention to the evidence, on average over the questions."""
        paid = [np.sum(self.mass(q)[..., [s.supporting for s in q.segments]], axis=-1) for q in questions]
        best = np.argsort(-np.mean(paid, axis=0), axis=None, kind="stable")[: self.config.heads]
        self.heads = np.unravel_index(best, paid[0].shape)

    def scores(self, question: Question) -> Float[np.ndarray, "G"]:
        """The mass that the chosen heads give to each segment, on average.

        Raises:
          UserError: no heads were chosen.
        """
        if self.heads is None:
            raise UserError("attention: got no heads, expected some; call choose with questions and their evidence")
        return self.mass(question)[self.heads].mean(axis=0)

    def rankings(self, questions: Sequence[Question]) -> tuple[list[tuple[int, ...]], float]:
        """(segments of each by falling score, encoder tokens × layers a question)."""
        before = self.tokens
        found = [baselines.ranking(self.scores(question)) for question in questions]
        return found, self.config.layers * (self.tokens - before) / len(questions)

    def mass(self, question: Question) -> Float[np.ndarray, "layers H G"]:
        """What every head gives to the tokens of each segment, on average over the question's tokens."""
        (job,) = slates.jobs([question])
        encode = functools.partial(self._tokenizer.encode, special=False)
        parts = [encode(f"{text}\n")[: self.config.longest] for text in job.segments]
        asked = encode(f"Question: {job.question}")
        lists = [self._tokenizer.encode(""), *parts, asked]
        ids = np.array([token for own in lists for token in own], np.int32)
        labels = np.repeat([-1, *range(len(parts)), -1], list(map(len, lists)))
        count = len(ids)
        self.tokens += count
        filled = (0, -count % TOKENS)
        ids, labels = np.pad(ids, filled), np.pad(labels, filled, constant_values=-1)
        at = count - len(asked) + np.arange(-(-len(asked) // WORDS) * WORDS)
        sizes = self.config.layers, -(-len(parts) // SEGMENTS) * SEGMENTS
        found = _mass(self._cfg, *sizes, self._params, ids, labels, at, at < count)
        return np.asarray(found)[..., : len(parts)]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _mass(
    cfg: ModelConfig,
    layers: int,
    segments: int,
    params: Params,
    ids: Int[Array, "N"],
    labels: Int[Array, "N"],
    at: Int[Array, "Q"],
    asked,
) -> Float[Array, "layers H segments"]:
    """Attention of the tokens `at` where they are `asked`, by the label of what they attend to."""
    seen = transformer.apply(cfg, params, ids, dense(1, len(ids)), layers=layers, taps=("queries", "keys")).taps
    member = jax.nn.one_hot(labels, segments)
    past = at[:, None] - jnp.arange(len(ids))

    def layer(own):
        q, k, window = own
        K, d, _ = k.shape
        q = q[..., jnp.minimum(at, len(ids) - 1)].reshape(K, -1, d, len(at)).astype(jnp.float32) * cfg.attn_scale
        visible = (past >= 0) & ((window == 0) | (past < window))
        scores = jnp.where(visible, jnp.einsum("kgdq,kdn->kgqn", q, k), jnp.finfo(jnp.float32).min)
        mass = jnp.einsum("kgqn,ns->kgqs", jax.nn.softmax(scores, axis=-1), member)
        return jnp.sum(jnp.where(asked[:, None], mass, 0), axis=2).reshape(-1, segments) / jnp.sum(asked)

    return jax.lax.map(layer, (seen["queries"], seen["keys"], jnp.asarray(cfg.windows[:layers])))
