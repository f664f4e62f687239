"""Systems beside each other on the same questions: who is right where, tables, and differences with intervals."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from molora_jax import benchmarking
from molora_jax.checkpoints.model import Model
from molora_jax.config import UserError
from molora_jax.data.example import Example
from molora_jax.evaluation import answered, bootstrap
from molora_jax.evaluation.accuracy import Accuracy
from molora_jax.evaluation.systems import System
from molora_jax.typing import Bool, Float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What came of it.

    Attributes:
      sets: the questions' ids, by the name of their set.
      right: by system and set, which questions it answered rightly.
      seconds: of each system, compilation included.
    """

    sets: dict[str, tuple[str, ...]]
    right: dict[str, dict[str, Bool[np.ndarray, "n"]]]
    seconds: dict[str, float]

    def accuracy(self, system: str, name: str) -> Accuracy:
        """Of a system on a set."""
        found = self.right[system][name]
        return Accuracy(int(found.sum()), len(found))

    def difference(self, ours: str, theirs: str, names: Sequence[str], **how) -> bootstrap.Difference:
        """Of two systems over some sets together, by `bootstrap.paired`."""
        return difference([self], ours, theirs, names, **how)

    @property
    def values(self) -> dict[str, Any]:
        """The same as JSON values."""
        right = {system: {n: v.astype(int).tolist() for n, v in own.items()} for system, own in self.right.items()}
        return dict(sets={name: list(ids) for name, ids in self.sets.items()}, right=right, seconds=self.seconds)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Comparison":
        """The inverse of `values`."""
        right = {s: {n: np.array(v, bool) for n, v in own.items()} for s, own in values["right"].items()}
        return cls({name: tuple(ids) for name, ids in values["sets"].items()}, right, dict(values["seconds"]))


def compare(
    model: Model,
    asked: Sequence[System],
    sets: Mapping[str, Sequence[Example]],
    *,
    most: Mapping[str, int] | None = None,
    kept: Path | None = None,
    **how,
) -> Comparison:
    """Lets each system answer all questions, and tells how long it took.

    Args:
      most: tokens of an answer, by set; by default what the length leaves them.
      kept: folder of what each system wrote; those that are there are not asked again (`answered.right`).
      how: for `systems.Answerer`.

    Raises:
      UserError: systems of one name.
    """
    names = [system.name for system in asked]
    if len(set(names)) < len(names):
        raise UserError(f"evaluate: got the systems {', '.join(names)}, expected different names")
    everything = [example for examples in sets.values() for example in examples]
    limits = None if most is None else [most[name] for name, examples in sets.items() for _ in examples]
    right, seconds = {}, {}
    for system in asked:
        found, seconds[system.name] = answered.right(model, system, everything, limits, kept, **how)
        print(f"{system.name}: {int(found.sum())} of {len(found)} right, {seconds[system.name]} s", flush=True)
        ends = np.cumsum([len(examples) for examples in sets.values()])
        right[system.name] = dict(zip(sets, np.split(found, ends[:-1]), strict=True))
    return Comparison({name: tuple(e.id for e in examples) for name, examples in sets.items()}, right, seconds)


def limits(items: Sequence[str], sets: Collection[str], default: int) -> dict[str, int]:
    """Most tokens of an answer by set: of `items`, N is for all of them and NAME=N for one.

    Raises:
      UserError: no number, or a set that nothing is asked of.
    """
    found = dict.fromkeys(sets, default)
    for item in sorted(items, key=lambda item: "=" in item):
        name, _, number = item.rpartition("=")
        if not number.isdecimal() or int(number) < 1 or name not in ("", *sets):
            raise UserError(f"max_new_tokens: got {item!r}, expected N, or NAME=N of {', '.join(sets)}; N from 1")
        found |= dict.fromkeys([name] if name else sets, int(number))
    return found


def difference(runs: Sequence[Comparison], ours: str, theirs: str, names: Sequence[str], **how) -> bootstrap.Difference:
    """Of two systems over some sets together, by `bootstrap.paired` over the runs and the questions.

    Args:
      runs: seeds on the same questions.

    Raises:
      UserError: runs on other questions.
    """
    if any(run.sets[name] != runs[0].sets[name] for run in runs for name in names):
        raise UserError("evaluate: got runs on different questions, expected the same ones to pair them")
    right = lambda system: np.stack([_joined(run, system, names) for run in runs])
    return bootstrap.paired(right(ours), right(theirs), **how)


def _joined(run: Comparison, system: str, names: Sequence[str]) -> Float[np.ndarray, "n"]:
    return np.concatenate([run.right[system][name].astype(float) for name in names])


def table(runs: Sequence[Comparison]) -> str:
    """A line a system, a column a set: means over the runs in percent, ± the standard deviation between them where
    there are several, else the 95 % interval; in Markdown."""
    first = runs[0]
    rows = [["system", *first.sets]]
    for system in first.right:
        cells = [_cell([run.accuracy(system, name) for run in runs if system in run.right]) for name in first.sets]
        rows.append([system, *cells])
    return benchmarking.markdown(rows)


def _cell(found: Sequence[Accuracy]) -> str:
    if len(found) == 1:
        return str(found[0])
    shares = [100 * accuracy.share for accuracy in found]
    return f"{np.mean(shares):.1f} ± {np.std(shares, ddof=1):.1f}"
