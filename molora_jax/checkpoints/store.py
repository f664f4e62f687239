"""Checkpoints of a run in one folder, through Orbax: written in the background, whole or not at all, the best kept."""

import contextlib
import logging
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from molora_jax.config import UserError
from molora_jax.typing import Array

Json = Any
"""What `json.dumps` takes."""


class Store:
    """The checkpoints of one run, by step; a context manager, which waits for what is still being written.

    A checkpoint is a flat dict of arrays and a JSON value. A process that is killed while it writes one leaves the
    ones before it as they are; what it left half-written is swept away by the next save of another process.

    Args:
      folder: made if need be. Several processes share it.
      keep_last: newest checkpoints that are kept.
      best: which scores are better; the best checkpoint that has one is kept besides.

    Raises:
      UserError: orbax is missing, or the folder cannot be written to.
    """

    def __init__(self, folder: Path | str, *, keep_last: int = 2, best: Literal["lowest", "highest"] = "lowest"):
        if keep_last < 1 or best not in ("lowest", "highest"):
            raise UserError(f"checkpoint: got keep_last={keep_last}, best={best!r}, expected 1 or more, lowest|highest")
        self._ocp, self.folder, self._best = _orbax(), Path(folder).absolute(), best
        self._swept = False
        logging.getLogger("absl").addFilter(_not_from_orbax)
        logging.getLogger("asyncio").addFilter(_not_told_already)
        if sys.unraisablehook is not _quiet_hook:
            _quiet_hook.before, sys.unraisablehook = sys.unraisablehook, _quiet_hook
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
            self._manager = self._open(keep_last)

    def _open(self, keep_last: int):
        managers = self._ocp.checkpoint_managers
        keep = managers.BestN(
            get_metric_fn=lambda metrics: metrics["score"],
            reverse=self._best == "lowest",
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        options = self._ocp.CheckpointManagerOptions(
            best_fn=lambda metrics: metrics["score"],  # without one the scores are not written down
            preservation_policy=managers.AnyPreservationPolicy([managers.LatestN(keep_last), keep]),
        )
        return self._ocp.CheckpointManager(self.folder, options=options)

    @property
    def steps(self) -> tuple[int, ...]:
        """All steps that can be restored, in order."""
        return tuple(sorted(self._manager.all_steps()))

    @property
    def latest(self) -> int | None:
        """The newest of them."""
        return max(self.steps, default=None)

    @property
    def best(self) -> int | None:
        """The one with the best score, the newest of equals; None where none has a score."""
        scores = {step: metrics["score"] for step in self.steps if (metrics := self._manager.metrics(step))}
        sign = -1 if self._best == "lowest" else 1
        return max(scores, key=lambda step: (sign * scores[step], step), default=None)

    def save(self, step: int, arrays: Mapping[str, Array], extra: Json = None, *, score: float | None = None) -> None:
        """Begins to write a checkpoint; once this returns, the arrays may be donated.

        Waits for the one before, if that is still being written. A step that is there already stays as it is.

        Raises:
          UserError: this one or the one before cannot be written; those before them stay.
        """
        if step in self.steps:
            return
        arrays = {name: _own(leaf) for name, leaf in arrays.items()}
        about = {name: [list(leaf.shape), leaf.dtype.name] for name, leaf in arrays.items()}
        args = self._ocp.args.Composite(
            arrays=self._ocp.args.StandardSave({name: leaf for name, leaf in arrays.items() if leaf.size}),
            extra=self._ocp.args.JsonSave(dict(arrays=about, extra=extra)),
        )
        with self._writing():
            self._sweep()
            self._manager.save(step, args=args, metrics=None if score is None else dict(score=float(score)), force=True)

    def restore(
        self, like: Mapping[str, Array | jax.ShapeDtypeStruct], step: int | None = None
    ) -> tuple[int, dict[str, Array], Json]:
        """(step, arrays, extra) of a checkpoint, by default the newest; each array sharded as the one in `like`.

        Raises:
          UserError: there is no such checkpoint, or it holds other arrays than `like`.
        """
        step = self.latest if step is None else step
        if step is None or step not in self.steps:
            have = ", ".join(map(str, self.steps)) or "none"
            raise UserError(f"checkpoint: got step {step} of {self.folder}, expected one of those there: {have}")
        restore = lambda **items: self._manager.restore(step, args=self._ocp.args.Composite(**items))
        extra = restore(extra=self._ocp.args.JsonRestore()).extra
        self._check(step, extra["arrays"], like)
        abstract = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))
            for name, leaf in like.items()
            if math.prod(leaf.shape)
        }
        arrays = restore(arrays=self._ocp.args.StandardRestore(abstract)).arrays if abstract else {}
        empty = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in like.items() if name not in abstract}
        return step, {**arrays, **empty}, extra["extra"]

    def _check(self, step: int, about: Mapping[str, list], like) -> None:
        where = f"checkpoint: step {step} of {self.folder}"
        if odd := sorted(set(about) ^ set(like)):
            whose = "is in the checkpoint alone" if odd[0] in about else "is not in the checkpoint"
            raise UserError(f"{where}: {odd[0]} {whose}; resume with the settings of that run, or in another folder")
        for name, leaf in like.items():
            got, want = about[name], [list(leaf.shape), jnp.dtype(leaf.dtype).name]
            if got != want:
                raise UserError(f"{where}: got {name} {got}, expected {want}; resume with the settings of that run")

    def _sweep(self) -> None:
        """Not when the folder is opened: that may be to read the checkpoints of a run that goes on."""
        if not self._swept and jax.process_index() == 0:
            for path in _folders(self.folder):
                if re.match(r"\d+\.orbax-checkpoint-tmp", path.name):
                    shutil.rmtree(path)
        self._swept = True

    def wait(self) -> None:
        """Until everything is written.

        Raises:
          UserError: it cannot be.
        """
        with self._writing():
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def close(self) -> None:
        """Waits, and ends the writing threads."""
        try:
            self.wait()
        finally:
            with contextlib.suppress(Exception):  # what went wrong has been raised by `wait`
                self._manager.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @contextlib.contextmanager
    def _writing(self):
        """Whatever goes wrong while writing, in one line: Orbax passes on errors of many kinds."""
        try:
            yield
        except Exception as e:
            good = [int(path.name) for path in _folders(self.folder) if path.name.isdigit()]  # unfinished: 7.orbax-…
            left = f"; the last good checkpoint is step {max(good)}" if good else ""
            raise UserError(
                f"checkpoint: got {_reason(e)!r} writing to {self.folder}, expected a folder with room; "
                f"make room or choose another{left}"
            ) from e


def _folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _not_from_orbax(record: logging.LogRecord) -> bool:
    """Keeps its stack traces off the screen: what they tell is raised, in one line."""
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def _not_told_already(record: logging.LogRecord) -> bool:
    """Drops the writes that failed together with the one that a save reports."""
    return "exception was never retrieved" not in record.getMessage()


def _quiet_hook(unraisable) -> None:
    """Drops what TensorStore's threads print when a write ends after another one's failure has closed their loop."""
    if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
        _quiet_hook.before(unraisable)


def _own(leaf: Array) -> Array:
    """A copy where the host could see the device's own memory, which the next step reuses."""
    leaf = jnp.asarray(leaf)
    return jnp.copy(leaf) if any(device.platform == "cpu" for device in leaf.devices()) else leaf


def _reason(error: BaseException) -> str:
    """What the system says, where it is in there: TensorStore has it in the middle of a text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    number = re.search(r"os_error_code='(\d+)'", str(error))
    if number or isinstance(error, OSError) and error.errno:
        return os.strerror(int(number[1]) if number else error.errno)
    return " ".join(str(error).split())[:200] or type(error).__name__


def _orbax():
    try:
        import orbax.checkpoint as ocp  # only here: it takes seconds to import
    except ImportError:
        raise UserError(
            "checkpoint: the package orbax-checkpoint is missing; pip install 'molora_jax[train]'"
        ) from None
    return ocp
