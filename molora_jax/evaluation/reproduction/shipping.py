"""What of a reproduction the package carries: of one seed the experts, their hard composition, MaLoRAs, R2R's head."""

import shutil
from pathlib import Path

from molora_jax.checkpoints.composition import ATTENTION, ROUTER
from molora_jax.checkpoints.resolve import PARTS
from molora_jax.config import UserError
from molora_jax.evaluation.reproduction.pair import HEAD
from molora_jax.evaluation.reproduction.plan import SINGLE, Plan, seed_folder


def ship(plan: Plan, runs: Path, seed: int, to: Path = PARTS) -> list[Path]:
    """Copies them into the package: `calc`, …, `hard`, `malora-text`, …, `r2r`; what was there is replaced.

    Raises:
      UserError: the stages `experts`, `mixtures`, `gates` and `pair` of that seed have not been done here.
    """
    folder = seed_folder(runs, seed)
    sources = {name: folder / name / "adapter" for name in SINGLE}
    sources |= {f"hard/{part}": folder / "hard" / part for part in (ROUTER, ATTENTION)}
    sources |= {name: folder / name for name in (*(f"malora-{domain}" for domain in plan.gate_domains), HEAD)}
    if missing := [source for source in sources.values() if not source.is_dir()]:
        raise UserError(
            f"ship: got no {missing[0]}, expected experts, mixtures, gates and pair of seed {seed} to be done"
        )
    for name, source in sources.items():
        shutil.rmtree(to / name, ignore_errors=True)
        shutil.copytree(source, to / name)
    return [to / name for name in sources]
