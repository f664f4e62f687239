"""What every row asks of the implementation that it runs on, and the verdict on what that did."""

import dataclasses
import pathlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from experiments.conformance.inputs import Inputs
from molora_jax.typing import Float

Group = Any
"""Adapters by name, loaded side by side on one base."""


class Side(Protocol):
    """One implementation. What it refuses, it refuses by raising; what it warns of, it adds to `said` or warns.

    Attributes:
      said: lines that a user would see.
    """

    name: str
    said: list[str]

    def bare(self, folder: pathlib.Path) -> Float[np.ndarray, "T V"]:
        """Logits of `inputs.TOKENS` by the model in a folder, without any adapter."""

    def load(self, folders: Mapping[str, pathlib.Path], base: str = "untied") -> Group:
        """Loads adapter folders, with all settings as they come."""

    def logits(self, group: Group, name: str = "x") -> Float[np.ndarray, "T V"]:
        """By one adapter, not merged."""

    def mixed(self, group: Group, names: Sequence[str]) -> Float[np.ndarray, "B T V"]:
        """A batch whose rows each have an adapter of their own."""

    def scales(self, group: Group) -> dict[str, float]:
        """Scale of "x" at each module, as "layers.0.self_attn.q_proj"."""

    def dtypes(self, group: Group) -> set[str]:
        """Of the factors of "x", in memory."""

    def delta(self, group: Group, name: str = "x") -> Float[np.ndarray, "F D"]:
        """scale·B A at q_proj of layer 0."""

    def combine(self, group: Group, weights: Mapping[str, float], method: str) -> Group:
        """A group with the sum under the name "sum"."""

    def merge(self, group: Group, folder: pathlib.Path) -> Float[np.ndarray, "T V"]:
        """Logits after merging "x" into the base, which is then written to a folder as a model."""

    def merged_weight(self, group: Group) -> tuple[np.ndarray, bool]:
        """q_proj of layer 0 after merging "x", and whether the rounding error of that is reported."""

    def toggled(self, group: Group, times: int) -> np.ndarray:
        """q_proj of layer 0 of the base after merging "x" and taking it out again so many times."""

    def save(self, group: Group, folder: pathlib.Path) -> dict[str, pathlib.Path]:
        """Writes every adapter of the group, and says where each lies."""

    def swap(self, group: Group, folder: pathlib.Path) -> Group:
        """The group with "x" replaced, in place, by the adapter in a folder."""

    def decode_xlora(self, folders: Mapping[str, pathlib.Path], base: str = "untied") -> tuple[bool, str]:
        """Whether X-LoRA over these adapters decodes with a cache what it decodes without."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the scoreboard.

    Attributes:
      input: what is tried.
      behaviour: what is right.
      check: whether it was done right, and what was done.
      refusal: pattern of the line with which refusing is right, too; None if it is not.
    """

    number: int
    input: str
    behaviour: str
    check: Callable[[Inputs, Side], tuple[bool, str]]
    refusal: str | None = None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`right`; `wrong`, with an error or a warning; or `silent`, wrong without a word."""

    word: str
    what: str


def judge(row: Row, inputs: Inputs, side: Side) -> Verdict:
    """Runs one row on one side."""
    side.said.clear()
    listen = lambda message, category, filename, *_: side.said.append(str(message)) if side.name in filename else None
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = listen
        try:
            right, what = row.check(inputs, side)
            raised = False
        except Exception as e:  # whatever a side raises is its answer
            what, raised = f"{type(e).__name__}: {e}", True
            right = row.refusal is not None and re.search(row.refusal, str(e), re.DOTALL) is not None
    said = "" if raised or not side.said else f"; said: {side.said[0][:90]}"
    what = " ".join((what + said).split()).replace(str(inputs.folder), "…")
    return Verdict("right" if right else "wrong" if raised or said else "silent", what[:200])
