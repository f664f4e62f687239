"""Where the numbers of a run go: the terminal, a JSONL file, TensorBoard."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import tqdm

from molora_jax import files
from molora_jax.config import UserError

FILE = "metrics.jsonl"


class Log:
    """A progress bar with the time left, and a line of JSON for each step that is logged; a context manager.

    A run that is resumed goes on with the same files: what they say of steps after the one that it resumes from, which
    a killed process may have written, is taken out.

    Args:
      folder: of `metrics.jsonl` and the TensorBoard files; None for the terminal alone.
      steps: of the whole run.
      start: steps done before.
      progress: whether the bar is drawn.
    """

    def __init__(self, folder: Path | None, *, steps: int, start: int = 0, progress: bool = True):
        self._bar = tqdm.tqdm(total=steps, initial=start, unit="step", disable=not progress, dynamic_ncols=True)
        self._file = self._board = None
        self._shown: dict[str, float] = {}
        self._tokens, self._since = 0, time.monotonic()
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _truncate(folder / FILE, start)
                self._file = (folder / FILE).open("a")
            except OSError as e:
                raise UserError(
                    f"metrics: got {e.strerror!r} writing to {folder}, expected a folder with room"
                ) from None
            self._board = _tensorboard(folder, start)

    def step(self, tokens: int) -> None:
        """Counts a step of so many tokens."""
        self._tokens += tokens
        self._bar.update()

    def write(self, step: int, values: Mapping[str, float], *, prefix: str = "") -> None:
        """Shows and writes numbers of a step, and the tokens a second since the last time."""
        values = {prefix + name: float(value) for name, value in values.items()}
        if not prefix and self._tokens:
            values["tokens_per_second"] = self._tokens / max(time.monotonic() - self._since, 1e-9)
            self._tokens, self._since = 0, time.monotonic()
        shown = {name: values[name] for name in ("loss", "eval_loss", "tokens_per_second") if name in values}
        self._shown |= shown
        self._bar.set_postfix({name: f"{value:.4g}" for name, value in self._shown.items()}, refresh=False)
        if self._file is not None:
            self._file.write(json.dumps(dict(step=step) | values) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()
        for sink in (self._file, self._board):
            if sink is not None:
                sink.close()


def _truncate(path: Path, start: int) -> None:
    """Keeps the whole lines of steps up to `start`; none of a run that begins anew, which says step 0 again."""
    if not path.exists():
        return
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    files.write(path, "".join(line for line in lines if start and json.loads(line)["step"] <= start))


def _tensorboard(folder: Path, start: int):
    try:
        import tensorboardX  # only here: it is optional
    except ImportError:
        print(
            "tensorboard: no files for it, tensorboardX is not installed: pip install 'molora_jax[train]'",
            file=sys.stderr,
        )
        return None
    return tensorboardX.SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1 if start else None)
