"""The curves of a run, from the lines that its log wrote."""

import json
import sys
from pathlib import Path

from molora_jax.training.metrics import FILE


def values(folder: Path, name: str) -> tuple[list[int], list[float]]:
    """The steps at which a number was logged, and its values there."""
    lines = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    found = [(line["step"], line[name]) for line in lines if name in line]
    return [step for step, _ in found], [value for _, value in found]


def draw(folder: Path, title: str) -> Path | None:
    """Writes `loss.png`, the training and the held-out loss by step; None, and a line, without matplotlib."""
    lines = {"training, one batch": ("loss", {}), "held out": ("eval_loss", dict(marker="o"))}
    return _drawn(folder, folder / "loss.png", lines, title, "loss a token (nats)")


def rewards(folder: Path, title: str) -> Path | None:
    """Writes `reward.png`, of a run of reinforcement; likewise."""
    lines = {
        "reward of the rollouts": ("reward", {}),
        "share of them that is right": ("accuracy", {}),
        "share right of the problems, greedy": ("eval_accuracy", dict(marker="o")),
        "share right of the problems, sampled": ("eval_sampled", dict(marker="s")),
    }
    return _drawn(folder, folder / "reward.png", lines, title, "reward, share")


def _drawn(folder: Path, path: Path, lines: dict[str, tuple[str, dict]], title: str, label: str) -> Path | None:
    try:
        from matplotlib.figure import Figure  # only here: it is optional
    except ImportError:
        print(f"{path}: not drawn, matplotlib is not installed: pip install 'molora_jax[bench]'", file=sys.stderr)
        return None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for text, (name, how) in lines.items():
        axes.plot(*values(folder, name), **(dict(linewidth=1) | how), label=text)
    axes.set(xlabel="step", ylabel=label, title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path
