"""Models that know one token after each token, so that everything they write can be written down by hand."""

from collections.abc import Mapping

import numpy as np

from molora_jax.checkpoints.model import Model
from molora_jax.config import ModelConfig
from molora_jax.data.example import Example
from molora_jax.data.testbed import vocabulary
from molora_jax.models import transformer

TOKENIZER = vocabulary.tokenizer()
END = TOKENIZER.eos[0]
WIDTH = 32


def token(text: str) -> int:
    """The one token of a text; "" is the end."""
    (found,) = TOKENIZER.encode(text, special=False) or [END]
    return found


def ids(table: Mapping[str, str]) -> dict[int, int]:
    return {token(first): token(second) for first, second in table.items()}


def model(table: Mapping[str, str], seed: int = 0) -> Model:
    """After each key comes its value, and after any other token the end; attention and MLP add nothing."""
    sizes = dict(vocab=TOKENIZER.vocab, width=WIDTH, layers=1, mlp_width=8, heads=2, kv_heads=1, head_width=4)
    cfg = ModelConfig(family="llama", windows=(0,), tied=False, attn_scale=0.5, max_positions=128, **sizes)
    params, rng = transformer.init(cfg, seed), np.random.default_rng(seed)
    for block, site in (("attn", "o_proj"), ("mlp", "down_proj")):
        weight = params["layers"][block][site]["weight"]
        params["layers"][block][site]["weight"] = np.zeros(weight.shape, np.float32)
    embed, head = (rng.normal(0, 0.05, (cfg.vocab, WIDTH)).astype(np.float32) for _ in range(2))
    embed[:, 0] += 1
    head[END, 0] += 1
    for feature, (first, second) in enumerate(ids(table).items(), 1):
        embed[first] += np.eye(WIDTH, dtype=np.float32)[feature] - np.eye(WIDTH, dtype=np.float32)[0]
        head[second, feature] += 1
    wanted = [ids(table).get(first, END) for first in range(cfg.vocab)]
    assert np.argmax(embed @ head.T, axis=1).tolist() == wanted, "choose another seed"
    params["embed"]["weight"], params["head"]["weight"] = embed, head
    return Model(cfg, params, TOKENIZER)


def example(number: int, prompt: str, answer: str) -> Example:
    return Example(id=str(number), task="calc", prompt=prompt, completion="", answer=answer, split="train")
