"""Rows of data files, with an account of those that cannot be used."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from absl import logging

from molora_jax.config import UserError

Row = tuple[int, Any]
"""(line of the file on which it begins, from 1; its content)"""
T = TypeVar("T")


class RowError(ValueError):
    """A row that cannot be used; its message says why."""


@dataclasses.dataclass(frozen=True)
class Skip:
    """A row that was left out.

    Attributes:
      file: where it is; the id of an example that has no line of a file.
      line: from 1, or None.
      why: what is wrong with it.
    """

    file: str
    line: int | None
    why: str

    def __str__(self) -> str:
        return f"{self.file}:{'' if self.line is None else f'{self.line}:'} {self.why}"


@dataclasses.dataclass
class Report:
    """What became of the rows of some files.

    Attributes:
      used: number of rows that were taken.
      left_out: number of good rows that do not belong to what was asked for.
      skipped: the bad ones, in order.
    """

    used: int = 0
    left_out: int = 0
    skipped: list[Skip] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        counts = f"{self.used} rows used, {self.left_out} left out, {len(self.skipped)} skipped"
        return "\n".join([counts, *map(str, self.skipped)])


def read(
    path: pathlib.Path,
    convert: Callable[[Any, int], T | None],
    report: Report,
    *,
    strict: bool = False,
    form: str | None = None,
) -> list[T]:
    """Converts every row of a `.jsonl`, `.json` (one array) or `.tsv` file.

    Args:
      convert: (content, line) to a value, or None to leave the row out; raises RowError for a row that it cannot use.
      report: counts good rows and takes in bad ones, which are logged as well.
      strict: a bad row is an error.
      form: ending that the file's form goes with, where its own ending says otherwise.

    Raises:
      UserError: the file cannot be read, or with `strict` a row is bad.
    """
    path, converted, before = pathlib.Path(path), [], len(report.skipped)
    for line, content in _rows(path, form or path.suffix):
        try:
            if isinstance(content, RowError):
                raise content
            value = convert(content, line)
        except RowError as e:
            skip = Skip(str(path), line, str(e))
            if strict:
                raise UserError(f"{skip}; mend the row, or leave out --strict to skip it") from None
            report.skipped.append(skip)
        else:
            if value is not None:
                converted.append(value)
            report.used += value is not None
            report.left_out += value is None
    if skipped := report.skipped[before:]:
        logging.warning("%s: skipped %d of %d rows", path, len(skipped), len(skipped) + len(converted))
        for skip in skipped[:10]:
            logging.warning("%s", skip)
    return converted


def field(row: Any, key: str, kind: type | tuple[type, ...], where: str = "") -> Any:
    """A field of a JSON row, checked; RowError when it is missing or of another type."""
    if not isinstance(row, dict):
        raise RowError(f"got {_kind(row)}{where}, expected an object with {key!r}")
    if key not in row:
        raise RowError(f"no {key!r}{where}")
    value = row[key]
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise RowError(f"{key!r}{where} is {_kind(value)}, expected {' or '.join(k.__name__ for k in kinds)}")
    return value


def texts(row: Any, key: str, where: str = "") -> tuple[str, ...]:
    """A field that is a list of strings."""
    values = field(row, key, list, where)
    if not all(isinstance(value, str) for value in values):
        raise RowError(f"{key!r}{where} holds something that is no string")
    return tuple(values)


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _rows(path: pathlib.Path, form: str) -> Iterator[Row]:
    """Rows of the file; a RowError in place of content that cannot be parsed."""
    readers = {".jsonl": _jsonl, ".json": _json, ".tsv": _tsv, ".txt": _tsv}
    if form not in readers:
        raise UserError(f"data: got {path}, expected a file that ends in {', '.join(readers)}")
    try:
        text = path.read_text("utf-8-sig")
    except OSError as e:
        raise UserError(f"data: cannot read {path}: {e.strerror}; give the folder by --data_dir") from None
    except UnicodeDecodeError as e:
        raise UserError(f"data: {path} is not UTF-8 at byte {e.start}; convert it") from None
    return readers[form](text, path)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank. Only a line feed ends one: JSON strings may hold other separators of Unicode."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line.removesuffix("\r")


def _jsonl(text: str, path: pathlib.Path) -> Iterator[Row]:
    for number, line in _lines(text):
        try:
            yield number, json.loads(line)
        except ValueError as e:
            yield number, RowError(f"not JSON: {e}")


def _json(text: str, path: pathlib.Path) -> Iterator[Row]:
    """Elements of one array."""
    decode, at = json.JSONDecoder().raw_decode, _skip_space(text, 0)
    if text[at : at + 1] != "[":
        raise UserError(f"data: {path} does not hold a JSON array")
    at, line, counted = _skip_space(text, at + 1), 1, 0
    while text[at : at + 1] != "]":
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, end = decode(text, at)
        except ValueError as e:
            raise UserError(f"data: {path}:{line}: not JSON: {e}; fetch the file again") from None
        yield line, value
        at = _skip_space(text, end)
        if text[at : at + 1] not in (",", "]"):
            raise UserError(f"data: {path}:{line}: expected a comma or the end of the array; fetch the file again")
        at = _skip_space(text, at + 1) if text[at] == "," else at


def _skip_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def _tsv(text: str, path: pathlib.Path) -> Iterator[Row]:
    """Columns, without quoting."""
    for number, line in _lines(text):
        yield number, line.split("\t")
