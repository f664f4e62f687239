"""What the tokens of a vocabulary read as: tables for rules that look at one token at a time."""

from collections.abc import Mapping

import numpy as np

from molora_jax.config import UserError
from molora_jax.text.tokenizer import Tokenizer
from molora_jax.typing import Bool, Int


def texts(tokenizer: Tokenizer, vocab: int) -> list[str]:
    """The text of each token alone, control tokens included; "" for ids without a token."""
    known = tokenizer.backend.decode_batch([[i] for i in range(min(vocab, tokenizer.vocab))], skip_special_tokens=False)
    return known + [""] * (vocab - len(known))


def holding(tokenizer: Tokenizer, vocab: int, text: str) -> Bool[np.ndarray, "V"]:
    """The tokens with `text` in them.

    Raises:
      UserError: no token has it, as where it always falls into several tokens.
    """
    found = np.array([bool(text) and text in each for each in texts(tokenizer, vocab)])
    if not found.any():
        raise UserError(f"delimiter: got {text!r}, expected a text that some single token of this vocabulary holds")
    return found


def numbers(tokenizer: Tokenizer, vocab: int) -> Int[np.ndarray, "V"]:
    """The number below 1,000 that each token reads as, spaces apart; -1 where it is none."""
    read = lambda text: int(text) if text.isascii() and text.isdigit() and len(text) < 4 else -1
    return np.array([read(text.strip()) for text in texts(tokenizer, vocab)], np.int32)


def words(tokenizer: Tokenizer, vocab: int, classes: Mapping[str, int]) -> Int[np.ndarray, "V"]:
    """The class of each token that is one of these words, in any case and with spaces around it; else 0."""
    return np.array([classes.get(text.strip().lower(), 0) for text in texts(tokenizer, vocab)], np.int32)


def single(tokenizer: Tokenizer, text: str) -> int:
    """The token that is `text`.

    Raises:
      UserError: the vocabulary has no such token.
    """
    known = tokenizer.backend.token_to_id(text)
    ids = [known] if known is not None else tokenizer.encode(text, special=False)
    if len(ids) != 1:
        raise UserError(f"tokenizer: got {len(ids)} tokens for {text!r}, expected a vocabulary with one token for it")
    return ids[0]
