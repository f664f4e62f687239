"""Text of a growing list of tokens, piece by piece."""

import codecs
from typing import Any, Protocol

from molora_jax.config import UserError
from molora_jax.text.tokenizer import Tokenizer


class Decoder(Protocol):
    """What turns tokens into text one by one; `flush` gives what is left of the last."""

    def push(self, token: Any) -> str: ...

    def flush(self) -> str: ...


class TextStream:
    """Decodes one answer while it is being generated.

    The pieces that `push` and `flush` return add up to `Tokenizer.decode` of all tokens, cut before the first stop
    string: the one that is complete first, as if the text came one character at a time. A piece never ends inside a
    character or inside what may become a stop string. The cost of a token does not grow with the text before it.

    Attributes:
      stopped: a stop string was met; nothing comes after it.
    """

    def __init__(self, tokenizer: Tokenizer | Decoder, stop: tuple[str, ...] = ()):
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise UserError(f"stream: got stop={stop!r:.80}, expected a tuple of strings that are not empty")
        self.stopped = False
        self._stops = tuple(stop)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        if isinstance(tokenizer, Tokenizer):
            tokenizer = _Bytes(tokenizer) if is_byte_level(tokenizer) else _Window(tokenizer)
        self._pieces = tokenizer

    def push(self, token: Any) -> str:
        """The text that this token makes final; often empty. What a token is, is for the decoder to say."""
        return "" if self.stopped else self._release(self._pieces.push(token))

    def flush(self) -> str:
        """The text still held back, once no token follows."""
        if self.stopped:
            return ""
        text = self._release(self._pieces.flush())
        text, self._held = text + self._held, ""
        return text

    def _release(self, piece: str) -> str:
        """Takes in new text; gives out what cannot belong to a stop string."""
        self._held += piece
        if (cut := self._first_stop()) is not None:
            text, self._held, self.stopped = self._held[:cut], "", True
            return text
        tails = range(min(self._longest - 1, len(self._held)), 0, -1)
        keep = next((n for n in tails if any(s.startswith(self._held[-n:]) for s in self._stops)), 0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def _first_stop(self) -> int | None:
        """Where the stop string begins that ends first in the held text; of several, the longest."""
        found = [(at + len(s), at) for s in self._stops if (at := self._held.find(s)) >= 0]
        return min(found)[1] if found else None


class _Bytes:
    """Byte-level BPE (GPT-2, Llama 3, Qwen): every token is some bytes, and the text is their UTF-8."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        token = int(token)
        text = None if token in self._tokenizer.special else self._tokenizer.backend.id_to_token(token)
        return "" if text is None else self._utf8.decode(token_bytes(text))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Window:
    """Any other tokenizer: decodes each token together with the one before it, which settles its leading space.

    A run of SentencePiece's byte tokens is text only as a whole (one bad byte spoils all of it), so it is held until
    another token ends it.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._falls_back = "ByteFallback" in str(tokenizer.backend.decoder)
        self._before: list[int] = []
        self._run: list[int] = []

    def push(self, token: int) -> str:
        token = int(token)
        text = None if token in self._tokenizer.special else self._tokenizer.backend.id_to_token(token)
        if text is None:
            return ""
        self._run.append(token)
        return "" if self._falls_back and is_byte(text) else self.flush()

    def flush(self) -> str:
        known = self._tokenizer.decode(self._before)
        piece = self._tokenizer.decode(self._before + self._run)[len(known) :]
        self._before, self._run = self._run[-1:], []
        return piece


def is_byte_level(tokenizer: Tokenizer) -> bool:
    return "ByteLevel(" in str(tokenizer.backend.decoder)


def is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _alphabet() -> dict[str, int]:
    """The character by which byte-level BPE writes each byte: itself where it prints, else one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _alphabet()


def token_bytes(text: str) -> bytes:
    """Bytes of a token; one with a character outside the alphabet was added as plain text."""
    if all(char in _BYTE_OF for char in text):
        return bytes(_BYTE_OF[char] for char in text)
    return text.encode()
