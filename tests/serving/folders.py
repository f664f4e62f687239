"""Tiny model folders with a tokenizer in them, as a user would name them."""

import pathlib

import numpy as np

from tests.checkpoints import tiny as weights
from tests.text import tiny

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"


def write(folder: pathlib.Path, *, seed: int = 0, padding: int = 0, extra: str = "\n\n") -> str:
    """A Llama of two layers with sharp random weights; `extra` is a token of its vocabulary, `padding` none."""
    tok = tiny.byte_level()
    tok.add_tokens([extra])
    vocab = tok.get_vocab_size(with_added_tokens=True) + padding
    config, tensors = weights.llama(vocab_size=vocab, max_position_embeddings=128)
    rng = np.random.default_rng(seed)
    tensors = {name: rng.standard_normal(w.shape).astype(np.float32) * 0.3 for name, w in tensors.items()}
    tensors["model.embed_tokens.weight"] = rng.standard_normal((vocab, 32)).astype(np.float32)
    weights.write(folder, config, tensors)
    tiny.write(folder, tok, tokenizer_config=dict(eos_token="<|im_end|>", chat_template=TEMPLATE))
    return str(folder)
