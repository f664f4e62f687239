"""Who wrote which part of a text, for a terminal by colour, for a log by a line of marks below each line."""

import itertools
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TextIO

MIDDLE = ("\x1b[33m", "\x1b[35m", "\x1b[34m", "\x1b[32m", "\x1b[31m")
"""Of the models between the first, which keeps the terminal's own colour, and the last."""

LAST, PLAIN = "\x1b[1;36m", "\x1b[0m"
WIDTH = 96
"""Columns after which a marked line is broken."""


class Provenance:
    """Writes parts of a text as they come, each in the manner of its writer.

    A model is told by its index; the first leaves no mark, the last `^`, others their index.
    """

    def __init__(self, out: TextIO, models: int, *, colour: bool):
        self._out, self._models, self._colour = out, models, colour
        self._line: list[tuple[str, str]] = []  # the characters of an unfinished line, and the mark of each

    def write(self, parts: Iterable[str], writers: Iterable[int]) -> None:
        """Adds text; without colours a line appears once it is whole."""
        if self._colour:
            for writer, run in itertools.groupby(zip(parts, writers, strict=True), key=lambda each: each[1]):
                self._out.write(self._painted("".join(text for text, _ in run), writer))
        else:
            for part, writer in zip(parts, writers, strict=True):
                self._mark(part, self.sign(writer))
        self._out.flush()

    def end(self) -> None:
        """Ends the text and its line."""
        if self._colour:
            self._out.write("\n")
        else:
            self._break()
        self._out.flush()

    def sign(self, writer: int) -> str:
        """The mark below a character that this model wrote."""
        return " " if writer == 0 else "^" if writer == self._models - 1 else str(writer)

    def legend(self, writers: Sequence[int]) -> str:
        """How many tokens each model wrote, and how that looks."""
        if not writers:
            return "no tokens"
        names = dict.fromkeys(range(self._models), "")
        for writer in names:
            count = sum(each == writer for each in writers)
            name = self._name(writer)
            names[writer] = f"{name} {count} of {len(writers)} tokens ({count / len(writers):.1%})"
        return ", ".join(names.values())

    def _name(self, writer: int) -> str:
        if self._models == 1:
            return "the model wrote"
        name = "small" if writer == 0 else "large" if writer == self._models - 1 else f"model {writer}"
        if self._colour:
            return self._painted(name, writer)
        return name if writer == 0 else f"{name} ({self.sign(writer)})"

    def _painted(self, text: str, writer: int) -> str:
        colour = "" if writer == 0 else LAST if writer == self._models - 1 else MIDDLE[(writer - 1) % len(MIDDLE)]
        return f"{colour}{text}{PLAIN}" if colour and text else text

    def _mark(self, part: str, sign: str) -> None:
        for character in part.expandtabs(4):
            if character == "\n":
                self._break()
                continue
            width = columns(character)
            if sum(columns(each) for each, _ in self._line) + width > WIDTH:
                spaces = [i for i, (each, _) in enumerate(self._line) if each == " "]
                self._break(spaces[-1] + 1 if spaces and character != " " else None)
            self._line.append((character, sign * width))

    def _break(self, after: int | None = None) -> None:
        """Writes the line, or what it has up to `after`; the rest begins the next one."""
        line, self._line = self._line[:after], [] if after is None else self._line[after:]
        marks = "".join(mark for _, mark in line).rstrip()
        self._out.write("".join(character for character, _ in line) + "\n" + (f"{marks}\n" if marks else ""))


def columns(character: str) -> int:
    """Columns that a character takes in a terminal."""
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
