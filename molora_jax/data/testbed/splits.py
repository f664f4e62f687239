"""Which split a problem belongs to, decided by the problem itself.

The hash of a problem's canonical text picks its split, so that no problem is in two of them, whatever the seeds and
however many are drawn. A prompt of several problems is in a split only if each of its problems is.
"""

import hashlib
from collections.abc import Callable
from typing import TypeVar

from molora_jax.config import UserError

SHARES = {"train": 0.9, "validation": 0.05, "test": 0.05}
_TRIES = 10_000

T = TypeVar("T")


def split_of(question: str) -> str:
    """The split of a problem by its canonical text."""
    at = int.from_bytes(hashlib.blake2b(question.encode(), digest_size=8).digest(), "big") / 2**64
    for split, share in SHARES.items():
        if at < share:
            return split
        at -= share
    return "test"


def check(split: str) -> None:
    """Raises UserError for the name of no split."""
    if split not in SHARES:
        raise UserError(f"testbed: got the split {split!r}, expected one of {', '.join(SHARES)}")


def draw_until(split: str, draw: Callable[[], T], question: Callable[[T], str]) -> T:
    """Draws until something of the split comes."""
    for _ in range(_TRIES):
        drawn = draw()
        if split_of(question(drawn)) == split:
            return drawn
    raise UserError(f"testbed: {_TRIES} draws gave nothing of the split {split!r}; raise the difficulty level")
