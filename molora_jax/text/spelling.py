"""Tokens as bytes of text, so that a text which one tokenizer's tokens spell can go on in another's."""

import codecs
import dataclasses
import functools
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers

from molora_jax.config import UserError
from molora_jax.text.stream import is_byte, is_byte_level, token_bytes
from molora_jax.text.tokenizer import Tokenizer
from molora_jax.typing import Int

SPACE = "▁"

WHOLE = 0
"""State of a text that ends with a whole character; the others are the beginnings of one (`_AFTER`)."""

_TAIL = range(0x80, 0xC0)
_AFTER = (None, (_TAIL, 0), (_TAIL, 1), (_TAIL, 2), (range(0xA0, 0xC0), 1), (range(0x80, 0xA0), 1))
_AFTER += ((range(0x90, 0xC0), 2), (range(0x80, 0x90), 2))
"""Of each state, the bytes that may follow, and the state they lead to (Unicode 16, table 3-7)."""
STATES = len(_AFTER)
_LEADS = {range(0xC2, 0xE0): 1, range(0xE0, 0xE1): 4, range(0xE1, 0xED): 2, range(0xED, 0xEE): 5}
_LEADS |= {range(0xEE, 0xF0): 2, range(0xF0, 0xF1): 6, range(0xF1, 0xF4): 3, range(0xF4, 0xF5): 7}


@dataclasses.dataclass(frozen=True)
class Special:
    """A special token in a text, by its name: it is no text, whatever its name looks like."""

    name: str


Piece = str | Special


class Spelling:
    """What the tokens of one tokenizer spell, and how a text is spelled by them.

    Raises:
      UserError: a tokenizer whose tokens do not each stand for bytes of the text, as one that puts a space before it.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._byte_level = tokenizer, is_byte_level(tokenizer)
        decoder = str(tokenizer.backend.decoder)
        if not self._byte_level and ("ByteFallback" not in decoder or "Strip" in decoder):
            raise UserError(
                f"tokenizer: got the decoder {decoder:.60}, expected byte-level BPE or byte fallback without a space "
                "before the text: only then can models of different tokenizers write one text"
            )
        self.vocab, self.eos = tokenizer.vocab, tokenizer.eos

    def spelled(self, token: int) -> bytes:
        """The bytes of text that a token stands for; none for a special token, nor for an id without a token."""
        text = None if token in self._tokenizer.special else self._tokenizer.backend.id_to_token(int(token))
        if text is None:
            return b""
        if self._byte_level:
            return token_bytes(text)
        return bytes([int(text[3:5], 16)]) if is_byte(text) else text.replace(SPACE, " ").encode()

    def special(self, token: int) -> Special | None:
        """The token, if it is a special one."""
        return Special(self._tokenizer.backend.id_to_token(int(token))) if token in self._tokenizer.special else None

    def encode(self, pieces: Iterable[Piece]) -> list[int]:
        """Token ids of a text from anywhere within; special tokens that are unknown by name are left out."""
        ids = []
        for piece in pieces:
            if isinstance(piece, Special):
                token = self._tokenizer.backend.token_to_id(piece.name)
                ids += [token] if token in self._tokenizer.special else []
            else:
                ids += self._plain.encode(piece, add_special_tokens=False).ids
        return ids

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """For which the name of a special token is ordinary text."""
        own = tokenizers.Tokenizer.from_str(self._tokenizer.backend.to_str())
        own.encode_special_tokens = True
        return own

    @functools.cached_property
    def transitions(self) -> Int[np.ndarray, "V STATES"]:
        """Where in a character a text ends after each token, from where it ended before."""
        spelled = [self.spelled(token) for token in range(self.vocab)]
        state = np.tile(np.arange(STATES, dtype=np.int8), (self.vocab, 1))
        for at in range(max(map(len, spelled), default=0)):
            rows = np.array([i for i, each in enumerate(spelled) if len(each) > at])
            state[rows] = _BYTES[state[rows], np.array([spelled[i][at] for i in rows])[:, None]]
        for token in range(self.vocab):
            if self.special(token):
                state[token] = WHOLE
        return state


def pieces(written: Iterable[tuple[Spelling, int]]) -> list[Piece]:
    """The text that tokens of several tokenizers spell one after another; bytes that are not UTF-8 become U+FFFD."""
    found, run = [], b""
    for spelling, token in written:
        special = spelling.special(token)
        if special:
            found += [_read(run), special]
            run = b""
        else:
            run += spelling.spelled(token)
    found.append(_read(run))
    return [piece for piece in found if piece]


def whole(written: Sequence[tuple[Spelling, int]]) -> list[bool]:
    """Whether the text before each token, and after the last, ends with a whole character."""
    states = [WHOLE]
    for spelling, token in written:
        states.append(WHOLE if spelling.special(token) else advance(states[-1], spelling.spelled(token)))
    return [state == WHOLE for state in states]


def advance(state: int, data: bytes) -> int:
    """The state after some more bytes."""
    for byte in data:
        state = int(_BYTES[state, byte])
    return state


def _read(data: bytes) -> str:
    return data.decode("utf-8", "replace")


class SpelledTokens:
    """The text of a growing list of tokens of several tokenizers, in whole characters: a decoder for `TextStream`."""

    def __init__(self, spellings: Sequence[Spelling]):
        self._spellings = spellings
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, written: tuple[int, int]) -> str:
        """The text that a (writer, token) makes final."""
        writer, token = written
        spelling = self._spellings[writer]
        if spelling.special(token):
            return self.flush()
        return self._utf8.decode(spelling.spelled(token))

    def flush(self) -> str:
        """What is left of an unfinished character."""
        return self._utf8.decode(b"", final=True)


def _table() -> Int[np.ndarray, "STATES 256"]:
    """The state after each byte. One that may not follow begins anew, as decoders that replace it do."""
    first = np.zeros(256, np.int8)
    for leads, state in _LEADS.items():
        first[list(leads)] = state
    table = np.tile(first, (STATES, 1))
    for state, after in enumerate(_AFTER):
        if after:
            table[state, list(after[0])] = after[1]
    return table


_BYTES = _table()


class Interpreter:
    """What several tokenizers make of each other's texts: see `engine.translation.Interpreter`."""

    def __init__(self, tokenizers: Sequence[Tokenizer]):
        """Raises `UserError` as `Spelling` does."""
        self.spellings = tuple(Spelling(tokenizer) for tokenizer in tokenizers)

    def encode(self, model: int, written: Sequence[tuple[int, int]]) -> list[int]:
        """The text of some (writer, token) pairs in the ids of `model`."""
        return self.spellings[model].encode(pieces((self.spellings[writer], token) for writer, token in written))

    def after(self, state: int, writer: int, token: int) -> int:
        """Where in a character the text ends after one more token."""
        spelling = self.spellings[writer]
        return WHOLE if spelling.special(token) else advance(state, spelling.spelled(token))
