"""Questions of any multi-hop data set from its files."""

import functools
import pathlib
from typing import Any

from molora_jax.config import UserError
from molora_jax.data.multihop import babi, musique, normalised, wikipedia
from molora_jax.data.multihop.question import Question
from molora_jax.data.rows import Report, field, read, texts

HOTPOTQA, WIKI2, MUSIQUE, BABI, NORMALISED = "hotpotqa", "2wikimultihopqa", "musique", "babi", "normalised"
FORMATS = (HOTPOTQA, WIKI2, MUSIQUE, BABI, NORMALISED)


def load(
    form: str,
    path: str | pathlib.Path,
    *,
    split: str | None = None,
    aliases: str | pathlib.Path | None = None,
    strict: bool = False,
    report: Report | None = None,
) -> list[Question]:
    """Reads a file.

    Args:
      form: one of `FORMATS`: the official form of a data set, or `normalised`.
      split: what the questions are of; with `normalised`, which the rows say, only that split, or all when None.
      aliases: 2WikiMultiHopQA's file of other names of the answers.
      strict: a malformed row is an error; otherwise it is skipped, logged and counted.
      report: takes in the counts and the malformed rows.

    Raises:
      UserError: no such form, a file that cannot be read, or a malformed row with `strict`.
    """
    if form not in FORMATS:
        raise UserError(f"multihop: got the form {form!r}, expected one of {', '.join(FORMATS)}")
    if split is None and form != NORMALISED:
        raise UserError(f"multihop: a file of {form} does not tell its split; say split='train' or another")
    path, report = pathlib.Path(path), Report() if report is None else report
    if form == BABI:
        return babi.load(path, split, report, strict=strict)
    if form == NORMALISED:
        convert = functools.partial(normalised.convert, split=split)
    elif form == MUSIQUE:
        convert = functools.partial(musique.convert, split=split)
    else:
        names = {} if aliases is None else _aliases(pathlib.Path(aliases), strict)
        convert = functools.partial(wikipedia.convert, dataset=form, split=split, aliases=names)
    return read(path, lambda row, line: convert(row), report, strict=strict)


def _aliases(path: pathlib.Path, strict: bool) -> dict[str, tuple[str, ...]]:
    """Aliases and demonyms by the answer's id, as the official score counts both."""

    def convert(row: Any, line: int) -> tuple[str, tuple[str, ...]]:
        return field(row, "Q_id", str), (*texts(row, "aliases"), *texts(row, "demonyms"))

    return dict(read(path, convert, Report(), strict=strict, form=".jsonl"))  # the official file ends in .json
