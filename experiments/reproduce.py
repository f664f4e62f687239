"""Everything that the project claims of its systems, on the testbed, over several seeds: tables, plots, raw numbers.

python -m experiments.reproduce                  # under an hour on two cores; started again, it goes on
python -m experiments.reproduce --stages=gates --seeds=0
python -m experiments.reproduce --summary        # only reads the results that are there
"""

import dataclasses
import os
from pathlib import Path

from absl import flags

from molora_jax import cli, compilation
from molora_jax.checkpoints.resolve import cache_folder
from molora_jax.config import UserError
from molora_jax.evaluation.reproduction import jobs, shipping, summary
from molora_jax.evaluation.reproduction.plan import QUICK, Plan

_RESULTS = flags.DEFINE_string("results", None, "Folder of tables, plots and raw JSON; by default results/testbed.")
_RUNS = flags.DEFINE_string("runs", None, "Folder of adapters, routers, and what is done; by default runs/reproduce.")
_STAGES = flags.DEFINE_list("stages", list(jobs.STAGES), f"Of {', '.join(jobs.STAGES)}.")
_SEEDS = flags.DEFINE_list("seeds", None, "Instead of 0,1,2.")
_KINDS = flags.DEFINE_list("kinds", None, "Mixtures instead of hard, hard_dense, soft, top2, xlora.")
_WORKERS = flags.DEFINE_integer("workers", None, "Jobs at a time; by default one a core.", lower_bound=1)
_QUICK = flags.DEFINE_bool("quick", False, "Tiny sizes, to see that it runs, in runs/quick; the numbers mean nothing.")
_JOB = flags.DEFINE_string("job", None, "STAGE:SEED, the only one to do, in this process.")
_SHIP = flags.DEFINE_integer("ship", None, "Seed whose experts, router, gates and head the package gets.")
_SUMMARY = flags.DEFINE_bool("summary", False, "Train nothing; read the results.")


def main() -> None:
    """Does what is not done yet, then writes the tables; see the flags."""
    compilation.use_cache(cache_folder() / "xla")
    quick = _QUICK.value
    plan = QUICK if quick else Plan()
    if _SEEDS.value:
        plan = dataclasses.replace(plan, seeds=cli.integers("seeds", _SEEDS.value))
    if _KINDS.value:
        plan = dataclasses.replace(plan, kinds=tuple(_KINDS.value))
    if unknown := sorted(set(_STAGES.value) - set(jobs.STAGES)):
        raise UserError(f"stages: got {unknown[0]}, expected some of {', '.join(jobs.STAGES)}")
    runs = Path(_RUNS.value or ("runs/quick" if quick else "runs/reproduce"))
    results = Path(_RESULTS.value or ("runs/quick/results" if quick else "results/testbed"))
    if _JOB.value:
        stage, _, seed = _JOB.value.partition(":")
        jobs.run(plan, (stage, int(seed)), runs)
        return
    if not _SUMMARY.value:
        own = [f"--runs={runs}", *["--quick"] * quick, f"--seeds={','.join(map(str, plan.seeds))}"]
        own += [f"--kinds={','.join(plan.kinds)}"]
        command = jobs.python("experiments.reproduce", *own)
        jobs.run_all(plan, _STAGES.value, runs, results, command, workers=_WORKERS.value or os.cpu_count())
    summary.write(results)
    if _SHIP.value is not None:
        shipping.ship(plan, runs, _SHIP.value)


if __name__ == "__main__":
    cli.run(main)
