"""The loss curve of a run, from the lines that its log wrote."""

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
    path = folder / "loss.png"
    try:
        from matplotlib.figure import Figure  # only here: it is optional
    except ImportError:
        print(f"{path}: not drawn, matplotlib is not installed: pip install 'molora_jax[bench]'", file=sys.stderr)
        return None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*values(folder, "loss"), linewidth=1, label="training, one batch")
    axes.plot(*values(folder, "eval_loss"), marker="o", label="held out")
    axes.set(xlabel="step", ylabel="loss a token (nats)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path
