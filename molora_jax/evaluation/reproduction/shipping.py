"""What of a reproduction the package carries: the experts of one seed, and the hard composition of them."""

import shutil
from pathlib import Path

from molora_jax.checkpoints.composition import ATTENTION, ROUTER
from molora_jax.checkpoints.resolve import PARTS
from molora_jax.config import UserError
from molora_jax.evaluation.reproduction.plan import SINGLE, seed_folder


def ship(runs: Path, seed: int, to: Path = PARTS) -> list[Path]:
    """Copies them into the package: `calc` and so on, and `hard`; what was there is replaced.

    Raises:
      UserError: the stages `experts` and `mixtures` of that seed have not been done here.
    """
    folder = seed_folder(runs, seed)
    sources = {name: folder / name / "adapter" for name in SINGLE}
    sources |= {f"hard/{part}": folder / "hard" / part for part in (ROUTER, ATTENTION)}
    if missing := [source for source in sources.values() if not source.is_dir()]:
        raise UserError(
            f"ship: got no {missing[0]}, expected the stages experts and mixtures of seed {seed} to be done"
        )
    for name, source in sources.items():
        shutil.rmtree(to / name, ignore_errors=True)
        shutil.copytree(source, to / name)
    return [to / name for name in sources]
