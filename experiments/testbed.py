"""Pretrains the testbed's bases from nothing and writes them, with what they can do, into the package.

python -m experiments.testbed
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
from molora_jax.evaluation import testbed
from molora_jax.training import pretrain
from molora_jax.training.pretrain import BASES

_BASES = flags.DEFINE_list("bases", list(BASES), f"Which to make, of {', '.join(BASES)}.")
_OUTPUT = flags.DEFINE_string(
    "output", str(TESTBED), "Folder that gets a folder for each; by default the package's own."
)
_RUNS = flags.DEFINE_string("runs", None, "Folder of checkpoints, from which a run that was killed goes on; none kept.")
_STEPS = flags.DEFINE_integer(
    "steps", None, "Updates, instead of as many as each base is meant to have.", lower_bound=1
)
_PROBLEMS = flags.DEFINE_integer("problems", 400, "Test problems of each domain.", lower_bound=1)


def main() -> None:
    """Trains one base after the other, writes it, reads it back and measures it; see the flags."""
    if unknown := set(_BASES.value) - set(BASES):
        raise UserError(f"bases: got {min(unknown)}, expected some of {', '.join(BASES)}")
    compilation.use_cache(cache_folder() / "xla")
    output, found = Path(_OUTPUT.value), {}
    for name in _BASES.value:
        base = BASES[name] if _STEPS.value is None else dataclasses.replace(BASES[name], steps=_STEPS.value)
        begun = time.monotonic()
        params = pretrain.pretrain(base, folder=Path(_RUNS.value) / name if _RUNS.value else None)
        seconds = time.monotonic() - begun
        pretrain.write(output / name, base.model, params)
        found[name] = testbed.by_domain(models.load(str(output / name)), _PROBLEMS.value)
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        facts = dict(
            parameters=size, bytes=(output / name / "model.safetensors").stat().st_size, seconds=round(seconds)
        )
        pretrain.record(output / name, base, facts | dict(accuracy=testbed.written(found[name])))
        print(f"{name}: {size:,} parameters, {facts['bytes']:,} bytes, {seconds / 60:.0f} minutes", flush=True)
    print(testbed.table(found))


if __name__ == "__main__":
    cli.run(main)
