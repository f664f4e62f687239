"""What a routed pair gives, from one seed or several: a table, two plots, and everything as JSON."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from molora_jax import benchmarking
from molora_jax.config import UserError
from molora_jax.evaluation import bootstrap
from molora_jax.evaluation.accuracy import Accuracy
from molora_jax.evaluation.bootstrap import Difference
from molora_jax.evaluation.pair import ENTROPY, QUESTION, RANDOM, TRAINED

Run = dict[str, Any]
"""What `pair.run` returns."""

NAMES = {
    TRAINED: "R2R, trained",
    ENTROPY: "entropy deferral",
    RANDOM: "random tokens",
    QUESTION: "whole questions, trained",
}


def write(folder: Path, runs: Sequence[Run]) -> None:
    """Writes `table.md`, `pair.json`, `accuracy.png` and `speed.png`.

    Raises:
      UserError: the folder cannot be written to, or runs of other shares or questions.
    """
    text = table(runs)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "table.md").write_text(text + "\n")
        values = dict(machine=benchmarking.provenance(), runs=list(runs))
        (folder / "pair.json").write_text(json.dumps(values) + "\n")
    except OSError as e:
        raise UserError(f"pair: got {e.strerror!r} writing to {folder}, expected a folder with room") from None
    for name, label in dict(accuracy="problems solved", speed="tokens per second").items():
        benchmarking.draw(folder / f"{name}.png", lambda axes, name=name, label=label: _plot(axes, runs, name, label))


def shares(runs: Sequence[Run]) -> list[float]:
    """At which the routers were measured, the ends apart.

    Raises:
      UserError: runs that differ in them.
    """
    found = [sorted({row["share"] for row in run["rows"]}) for run in runs]
    if not found or any(each != found[0] for each in found):
        raise UserError(f"pair: got runs at the shares {found}, expected the same, and at least one run")
    return found[0]


def points(runs: Sequence[Run], router: str, share: float) -> list[dict[str, Any]]:
    """The measurement of a router at a share, of each run."""
    own = [row for run in runs for row in run["rows"] if (row["router"], row["share"]) == (router, share)]
    if len(own) != len(runs):
        raise UserError(f"pair: got {len(own)} of {len(runs)} runs with {router} at {share}, expected all")
    return own


def difference(runs: Sequence[Run], ours: str, theirs: str, share: float) -> Difference:
    """Of two routers at a share, paired by question and run."""
    right = lambda router: np.array([row["right"] for row in points(runs, router, share)])
    return bootstrap.paired(right(ours), right(theirs))


def accuracy_at(runs: Sequence[Run], router: str, share: float) -> float:
    """The mean over the runs of what a router solves at a share."""
    return float(np.mean([row["accuracy"]["share"] for row in points(runs, router, share)]))


def table(runs: Sequence[Run]) -> str:
    """A line a router and share, the models alone around them, in Markdown; means over the runs."""
    rows = [["router", "share", "realised", "solved", "over random tokens", "tokens/s"]]
    end = lambda name: [run["ends"][name] for run in runs]
    rows.append(["small model", "0", *_cells(end("small"), None)])
    for share in shares(runs):
        for router, name in NAMES.items():
            gap = None if router == RANDOM else difference(runs, router, RANDOM, share)
            rows.append([name, f"{share:g}", *_cells(points(runs, router, share), gap)])
    rows.append(["large model", "1", *_cells(end("large"), None)])
    return benchmarking.markdown(rows)


def _cells(found: Sequence[dict[str, Any]], gap: Difference | None) -> list[str]:
    over = "" if gap is None else f"{100 * gap.mean:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f})"
    mean = lambda name: np.mean([each[name] for each in found])
    return [f"{mean('realised'):.3f}", _solved(found), over, f"{mean('tokens_per_s'):.0f}"]


def _solved(found: Sequence[dict[str, Any]]) -> str:
    if len(found) == 1:
        return str(Accuracy(found[0]["accuracy"]["right"], found[0]["accuracy"]["n"]))
    own = [100 * each["accuracy"]["share"] for each in found]
    return f"{np.mean(own):.1f} ± {np.std(own, ddof=1):.1f}"


def _plot(axes, runs: Sequence[Run], name: str, label: str) -> None:
    """A line a router from the small model alone to the large one; bars are intervals, of several runs ± sd."""
    low, high = ([run["ends"][end] for run in runs] for end in ("small", "large"))
    for router, title in NAMES.items():
        found = [low, *(points(runs, router, share) for share in shares(runs)), high]
        at = [np.mean([each["realised"] for each in own]) for own in found]
        if name == "accuracy":
            values, bars = zip(*(_interval(own) for own in found), strict=True)
            axes.errorbar(at, values, np.array(bars).T, label=title, marker="o", markersize=4, capsize=2)
        else:
            axes.plot(at, [np.mean([each["tokens_per_s"] for each in own]) for own in found], "o-", label=title, ms=4)
    axes.set(xlabel="large model's share of the tokens", ylabel=label)
    axes.legend()
    axes.grid(alpha=0.3)


def _interval(found: Sequence[dict[str, Any]]) -> tuple[float, tuple[float, float]]:
    """The mean accuracy, and how far its bar reaches down and up."""
    own = [each["accuracy"] for each in found]
    mean = float(np.mean([each["share"] for each in own]))
    if len(own) == 1:
        return mean, (max(mean - own[0]["low"], 0), max(own[0]["high"] - mean, 0))
    spread = float(np.std([each["share"] for each in own], ddof=1))
    return mean, (spread, spread)
