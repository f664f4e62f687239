"""Pretrains the testbed's bases from nothing and writes them, with what they can do, into the package.

python -m experiments.testbed
python -m experiments.testbed --notrain    # measures the bases that are there
"""

import dataclasses
import time
from pathlib import Path

import jax
from absl import flags

from molora_jax import cli, compilation
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.resolve import TESTBED, cache_folder
from molora_jax.config import UserError
from molora_jax.data.testbed.recipe import COMMON, TASKS
from molora_jax.evaluation import testbed
from molora_jax.training import pretrain
from molora_jax.training.pretrain import BASES

MEASURES = {"common": COMMON, "tasks": TASKS}

_BASES = flags.DEFINE_list("bases", list(BASES), f"Which to make, of {', '.join(BASES)}.")
_OUTPUT = flags.DEFINE_string(
    "output", str(TESTBED), "Folder that gets a folder for each; by default the package's own."
)
_RUNS = flags.DEFINE_string("runs", None, "Folder of checkpoints, from which a run that was killed goes on; none kept.")
_STEPS = flags.DEFINE_integer(
    "steps", None, "Updates, instead of as many as each base is meant to have.", lower_bound=1
)
_TRAIN = flags.DEFINE_bool("train", True, "Train them; else only measure those in --output.")
_PROBLEMS = flags.DEFINE_integer("problems", 400, "Test problems of each domain.", lower_bound=1)


def main() -> None:
    """Trains one base after the other, writes it, reads it back and measures it; see the flags."""
    if unknown := set(_BASES.value) - set(BASES):
        raise UserError(f"bases: got {min(unknown)}, expected some of {', '.join(BASES)}")
    compilation.use_cache(cache_folder() / "xla")
    output, found = Path(_OUTPUT.value), {}
    for name in _BASES.value:
        if _TRAIN.value:
            _train(name, output / name)
        model = models.load(str(output / name))
        accuracy = {
            label: testbed.by_domain(model, _PROBLEMS.value, recipe=recipe) for label, recipe in MEASURES.items()
        }
        pretrain.record(output / name, accuracy={label: testbed.written(own) for label, own in accuracy.items()})
        found |= {f"{name}, {label}": own for label, own in accuracy.items()}
    print(testbed.table(found))


def _train(name: str, folder: Path) -> None:
    base = BASES[name] if _STEPS.value is None else dataclasses.replace(BASES[name], steps=_STEPS.value)
    begun = time.monotonic()
    params = pretrain.pretrain(base, folder=Path(_RUNS.value) / name if _RUNS.value else None)
    seconds = time.monotonic() - begun
    pretrain.write(folder, base.model, params)
    facts = dict(
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        bytes=(folder / "model.safetensors").stat().st_size,
        seconds=round(seconds),
    )
    pretrain.record(folder, command="make testbed", settings=pretrain.settings(base), **facts)
    print(
        f"{name}: {facts['parameters']:,} parameters, {facts['bytes']:,} bytes, {seconds / 60:.0f} minutes", flush=True
    )


if __name__ == "__main__":
    cli.run(main)
