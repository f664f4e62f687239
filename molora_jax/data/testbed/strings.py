"""String edits: a word of spaced letters is reversed, turned, cut and shifted.

`text: k f m t, rev, drop` is solved by ` rev: t m f k; drop: t m f -> t m f`.
"""

import string

from molora_jax.data.testbed.problem import Domain, Operation, Sign, listed

_SHORTEST, _LONGEST = 3, 7


def _word(rng, level):
    return tuple(rng.choice(string.ascii_lowercase) for _ in range(min(4 + level // 2, 6)))


def _show(word):
    return "".join(f" {letter}" for letter in word)


def _next(letter):
    return chr((ord(letter) - ord("a") + 1) % 26 + ord("a"))


def _shrinks(word):
    return len(word) > _SHORTEST


def _grows(word):
    return len(word) < _LONGEST


STRINGS = Domain(
    name="text",
    start=_word,
    operations=(
        Operation("rev", lambda w, _: w[::-1]),
        Operation("turn", lambda w, _: (*w[1:], w[0])),
        Operation("drop", lambda w, _: w[:-1], fits=_shrinks),
        Operation("twice", lambda w, _: (*w, w[-1]), fits=_grows),
        Operation("next", lambda w, _: tuple(map(_next, w)), level=2),
    ),
    signs=(
        Sign(
            Operation("@", lambda w, _: (w[-1], *w[1:-1], w[0])),
            Operation("@", lambda w, _: (w[1], w[0], *w[2:])),
        ),
        Sign(
            Operation("#", lambda w, _: w[1:], fits=_shrinks),
            Operation("#", lambda w, _: (w[0], *w), fits=_grows),
        ),
        Sign(
            Operation("~", lambda w, _: (w[-1], *w[:-1])),
            Operation("~", lambda w, _: (*w[:-2], w[-1], w[-2])),
        ),
    ),
    show=_show,
    ask=listed,
    work=lambda name, operand, before, after: f" {name}:{_show(after)}",
)
