"""An evaluation in a folder: a table in Markdown, everything as JSON, and pictures of who was routed where."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from molora_jax import benchmarking, files
from molora_jax.adapters.composition import Composition
from molora_jax.checkpoints.model import Model
from molora_jax.config import UserError
from molora_jax.data.example import Example
from molora_jax.evaluation import comparison
from molora_jax.evaluation.comparison import Comparison
from molora_jax.evaluation.routing import Routing, routing
from molora_jax.evaluation.systems import ORACLE
from molora_jax.training import compose, specialist

NUMBERS = ("top_mass", "margin", "entropy", "switch_rate", "weight")


def write(
    folder: Path,
    model: Model,
    found: Comparison,
    composed: Mapping[str, Composition],
    sets: Mapping[str, Sequence[Example]],
    *,
    length: int,
    routed: int | None = None,
) -> None:
    """Writes `table.md`, `evaluation.json` and `routing_NAME.png` of each composition.

    Args:
      length: most tokens of a question with its worked answer.
      routed: so many questions of each set tell how their tokens are routed; by default all.

    Raises:
      UserError: the folder cannot be written to.
    """
    values = dict(machine=benchmarking.provenance(), comparison=found.values, parameters=sizes(composed))
    tables = [comparison.table([found])]
    if ORACLE in found.right:
        tables.append(differences(found, ORACLE))
    _write(folder, tables, values)  # what took long is safe before the rest is found
    if not composed:
        return
    told = [example for examples in sets.values() for example in examples[:routed]]
    routes = {name: routing(model, c, told, length=length) for name, c in composed.items()}
    values["routing"] = {name: as_values(r) for name, r in routes.items()}
    _write(folder, [*tables, size_table(composed), routing_table(routes)], values)
    for name, r in routes.items():
        draw(folder / f"routing_{name}.png", r, name)


def _write(folder: Path, tables: Sequence[str], values: Mapping) -> None:
    try:
        files.write(folder / "table.md", "\n\n".join(tables) + "\n")
        files.write(folder / "evaluation.json", json.dumps(values) + "\n")
    except OSError as e:
        raise UserError(f"evaluate: got {e.strerror!r} writing to {folder}, expected a folder with room") from None


def differences(found: Comparison, theirs: str) -> str:
    """A line a system, a column a set: points by which it is better than `theirs`, by the paired bootstrap; Markdown.

    Over the oracle, which gives each domain its own expert, this is how far experts are preserved.
    """
    rows = [[f"points over {theirs}", *found.sets]]
    for ours in found.right:
        if ours != theirs:
            rows.append([ours, *(found.difference(ours, theirs, [name]).points for name in found.sets)])
    return benchmarking.markdown(rows)


def as_values(found: Routing) -> dict:
    """The same as JSON values."""
    return dataclasses.asdict(found) | dict(confusion=found.confusion.round(4).tolist())


def sizes(composed: Mapping[str, Composition]) -> dict[str, dict[str, int]]:
    """How many parameters each expert has, and those that are trained to compose them: router and attention LoRA."""
    experts = {expert.name: specialist.count(expert) for found in composed.values() for expert in found.experts}
    return dict(experts=experts) | {name: compose.parameters(found) for name, found in composed.items()}


def size_table(composed: Mapping[str, Composition]) -> str:
    """The same in Markdown."""
    found = sizes(composed)
    rows = [["what", "parameters"]]
    rows += [[f"expert {name}", f"{count:,}"] for name, count in found.pop("experts").items()]
    rows += [[f"{name}: {part}", f"{count:,}"] for name, own in found.items() for part, count in own.items()]
    return benchmarking.markdown(rows)


def routing_table(routed: Mapping[str, Routing]) -> str:
    """A line a composition: how sure its router is, means over layers, in Markdown."""
    rows = [["composition", *NUMBERS]]
    for name, found in routed.items():
        rows.append([name, *(f"{found.mean(n):.3f}" if n in found.by_layer else "" for n in NUMBERS)])
    return benchmarking.markdown(rows)


def draw(path: Path, found: Routing, title: str) -> None:
    """The confusion of domains and experts as a picture."""

    def plot(axes):
        shown = axes.imshow(found.confusion, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(found.experts)), found.experts, rotation=45, ha="right")
        axes.set_yticks(range(len(found.domains)), found.domains)
        axes.set(xlabel="expert", ylabel="domain of the token", title=title)
        axes.figure.colorbar(shown, label="share of tokens and layers")

    size = (2 + 0.7 * len(found.experts), 1.5 + 0.5 * len(found.domains))
    benchmarking.draw(path, plot, size=size)
