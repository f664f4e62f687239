"""A benchmark: its files, how a row becomes an example, and how completions are judged."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from molora_jax.config import UserError
from molora_jax.data.example import Example
from molora_jax.data.rows import Report, read
from molora_jax.data.tasks.judge import Judge

DATA_DIR = "MOLORA_DATA_DIR"
"""Environment variable that names the data folder where none is given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A benchmark in the format of its official files.

    Attributes:
      name: key of the registry.
      files: per split, patterns of file names within the data folder; all files that match are read.
      convert: (row, id by file and line, split) to an example; None leaves the row out; raises `rows.RowError`.
      judge: of its completions.
    """

    name: str
    files: Mapping[str, Sequence[str]]
    convert: Callable[[Any, str, str], Example | None]
    judge: Judge

    def load(
        self,
        split: str,
        *,
        data_dir: str | pathlib.Path | None = None,
        files: Sequence[str | pathlib.Path] | None = None,
        strict: bool = False,
        report: Report | None = None,
    ) -> list[Example]:
        """The examples of a split.

        Args:
          data_dir: folder of the data; the environment variable MOLORA_DATA_DIR when None.
          files: these files instead of the ones in the data folder.
          strict: a malformed row is an error; otherwise it is skipped, logged and counted.
          report: takes in the counts and the malformed rows.

        Raises:
          UserError: no such split, no data folder, no such file, or a malformed row with `strict`.
        """
        if split not in self.files:
            raise UserError(f"{self.name}: got the split {split!r}, expected one of {', '.join(self.files)}")
        paths = [pathlib.Path(f) for f in files] if files is not None else self._paths(split, data_folder(data_dir))
        report = Report() if report is None else report
        found: list[Example] = []
        for path in paths:
            convert = functools.partial(self._example, path=path, split=split)
            found += read(path, convert, report, strict=strict)
        return found

    def _example(self, row: Any, line: int, *, path: pathlib.Path, split: str) -> Example | None:
        return self.convert(row, f"{self.name}/{path.stem}/{line}", split)

    def _paths(self, split: str, folder: pathlib.Path) -> list[pathlib.Path]:
        paths = []
        for pattern in self.files[split]:
            matching = sorted(folder.glob(pattern))
            if not matching:
                raise UserError(
                    f"{self.name}: found no {pattern} in {folder}, expected the data folder; set --data_dir"
                )
            paths += matching
        return paths


def data_folder(data_dir: str | pathlib.Path | None) -> pathlib.Path:
    """The data folder given, else the one that MOLORA_DATA_DIR names.

    Raises:
      UserError: neither is given, or it is no folder.
    """
    named = data_dir if data_dir is not None else os.environ.get(DATA_DIR)
    if not named:
        raise UserError(f"data: got no data folder, expected --data_dir=FOLDER or the environment variable {DATA_DIR}")
    folder = pathlib.Path(named).expanduser()
    if not folder.is_dir():
        raise UserError(f"data: {folder} is no folder; give the data folder by --data_dir or {DATA_DIR}")
    return folder
