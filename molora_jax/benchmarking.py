"""The one form of every benchmark: interleaved runs, minimum and median, table, JSON file, plot, SUMMARY line."""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from molora_jax import files

RESULTS = pathlib.Path("results/bench")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds that one candidate took in each of its runs."""

    runs: tuple[float, ...]

    @property
    def min(self) -> float:
        return min(self.runs)

    @property
    def median(self) -> float:
        return statistics.median(self.runs)


def interleave(candidates: Mapping[str, Callable[[], float | None]], repeats: int, *, rest: float = 0.0):
    """Runs all candidates once to warm up, then in turn `repeats` times: name to `Timing`.

    A candidate returns the seconds that count, or None: then all of the call counts. `rest` seconds of sleep after each
    call let the worker threads of one library stop spinning before the next one is timed.
    """
    runs = {name: [] for name in candidates}
    for turn in range(-1, repeats):
        for name, candidate in candidates.items():
            begun = time.perf_counter()
            seconds = candidate()
            took = time.perf_counter() - begun if seconds is None else seconds
            if turn >= 0:
                runs[name].append(took)
            time.sleep(rest)
    return {name: Timing(tuple(times)) for name, times in runs.items()}


def peak_bytes(call: Callable[[], Any]) -> int | None:
    """By how much one call raises the resident memory of this process at its highest; None where Linux does not say.

    To be asked once a process: pages that an earlier call gave back may be used again without being counted.
    """
    try:
        before = _resident("VmRSS")
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the highest mark starts anew
    except OSError:
        return None
    call()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores, load, versions."""
    versions = {}
    for package in ("jax", "jaxlib", "flax", "numpy", "torch", "transformers", "peft", "mambapy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return dict(
        processor=_processor(),
        cores=os.cpu_count(),
        device=jax.devices()[0].device_kind,
        python=platform.python_version(),
        versions=versions,
        load=os.getloadavg(),
    )


def provenance() -> dict[str, Any]:
    """`machine`, with the command and the commit: what stands beside every number that is kept."""
    spec = sys.modules["__main__"].__spec__
    command = " ".join(["python -m", spec.name if spec else sys.argv[0], *sys.argv[1:]])
    return machine() | dict(command=command, commit=_commit())


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


class Bench:
    """Collects the rows of one benchmark and writes them in the common form.

    Attributes:
      name: of the files under `results/bench`.
      rows: one dict a line of the table; all numbers that were measured.
    """

    def __init__(self, name: str):
        self.name = name
        self.rows: list[dict[str, Any]] = []
        self._load = os.getloadavg()

    def add(self, **row: Any) -> None:
        """Adds a row and prints it at once."""
        self.rows.append(row)
        print("  ".join(f"{key}={_short(value)}" for key, value in row.items()), flush=True)

    def save(self, summary: Mapping[str, float]) -> dict[str, Any]:
        """Writes NAME.json as far as it has come, and gives what it says of the machine."""
        facts = provenance() | dict(load_at_start=self._load)
        text = json.dumps(dict(machine=facts, summary=dict(summary), rows=self.rows), indent=1)
        files.write(RESULTS / f"{self.name}.json", text + "\n")
        return facts

    def finish(self, summary: Mapping[str, float], plot: Callable[[Any], None] | None = None) -> None:
        """Prints the machine and the SUMMARY line, and writes NAME.json and NAME.png; `plot` draws on pyplot axes."""
        facts = self.save(summary)
        if plot is not None:
            draw(RESULTS / f"{self.name}.png", plot)
        load = " ".join(f"{value:.2f}" for value in facts["load"])
        versions = " ".join(f"{k} {v}" for k, v in facts["versions"].items())
        print(f"{facts['processor']}, {facts['cores']} cores, load {load}; python {facts['python']} {versions}")
        print_summary(summary)


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """A table; the first row is its head."""
    head, *rest = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rest))


def print_summary(summary: Mapping[str, float]) -> None:
    """The last line of every benchmark."""
    print("SUMMARY " + " ".join(f"{key}={_short(value)}" for key, value in summary.items()), flush=True)


def draw(path: pathlib.Path, plot: Callable[[Any], None], *, size: tuple[float, float] = (7, 4.5)) -> None:
    """Writes a PNG of `size` inches of what `plot` draws on pyplot axes; says so where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print(f"{path}: not drawn, matplotlib is not installed: pip install 'molora_jax[bench]'")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    plot(axes)
    figure.savefig(path, dpi=120)


def _commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
