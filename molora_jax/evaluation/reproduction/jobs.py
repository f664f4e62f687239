"""The jobs of a reproduction: which there are, what each needs, and as many at a time as there are cores."""

import dataclasses
import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from molora_jax import benchmarking, files
from molora_jax.config import UserError
from molora_jax.evaluation.reproduction.plan import Plan

STAGES = {
    "experts": (),
    "mixtures": ("experts",),
    "gates": (),
    "controls": ("experts",),
    "sequences": (),
    "pair": (),
}
"""By name, with those that must be done for the same seed before; the longest first: no core waits at the end."""
PACKAGE = "molora_jax.evaluation.reproduction"

Job = tuple[str, int]
"""(stage, seed)"""


def raw(folder: Path, job: Job) -> Path:
    """The file that a job writes into the folder of its runs, and that is then copied to the results."""
    return folder / "raw" / f"{job[0]}_{job[1]}.json"


def done(plan: Plan, runs: Path, job: Job) -> bool:
    """Whether the file of a job lies beside what it trained, made by what the job uses of the plan."""
    path = raw(runs, job)
    if not path.exists():
        return False
    return alike(job[0], json.loads(path.read_text())["plan"], _written(plan))


def alike(stage: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two written plans ask the same of a stage."""
    return all(one.get(name) == other.get(name) for name in _module(stage).USES)


def run(plan: Plan, job: Job, runs: Path) -> None:
    """Does one job in this process, and writes its file."""
    stage, seed = job
    begun = time.monotonic()
    found = _module(stage).run(plan, seed, runs)
    minutes = round((time.monotonic() - begun) / 60, 2)
    whole = dict(stage=stage, seed=seed, plan=_written(plan), machine=benchmarking.provenance(), minutes=minutes)
    files.write(raw(runs, job), json.dumps(whole | dict(found=found)) + "\n")


def _module(stage: str) -> Any:
    """The stage's, with `USES`, fields of a plan, and `run(plan, seed, runs)`."""
    return importlib.import_module(f"{PACKAGE}.{stage}")


def _written(plan: Plan) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(plan)))


def run_all(
    plan: Plan, stages: Sequence[str], runs: Path, results: Path, command: Sequence[str], *, workers: int
) -> None:
    """Does all jobs that are not done yet, each in a process of its own on a core of its own, and copies their files.

    Args:
      command: of a job, to which `--job=STAGE:SEED` is added.

    Raises:
      UserError: a job that failed, after the others that run have ended; started again, only what is missing is done.
    """
    # one seed after another: side by side they would compile the same programs, which a later one finds in the cache
    ordered = itertools.product(plan.seeds, [stage for stage in STAGES if stage in stages])
    waiting = [(stage, seed) for seed, stage in ordered if not done(plan, runs, (stage, seed))]
    count, begun = len(waiting), time.monotonic()
    running: dict[int, tuple[Job, subprocess.Popen]] = {}
    failed: list[Job] = []
    while running or (waiting and not failed):
        for core in range(workers):
            job = next((job for job in waiting if _may(plan, runs, job)), None)
            if core in running or job is None or failed:
                continue
            waiting.remove(job)
            running[core] = (job, _start(job, core, runs, command))
            print(f"{job[0]}, seed {job[1]}: begun", flush=True)
        if not running:
            break
        time.sleep(0.5)
        for core, (job, process) in list(running.items()):
            if process.poll() is not None:
                del running[core]
                print(f"{job[0]}, seed {job[1]}: {'failed' if process.returncode else 'done'}", flush=True)
                failed += [job] * bool(process.returncode)
    if failed:
        stage, seed = failed[0]
        raise UserError(f"reproduce: {stage} of seed {seed} failed; see {_log(runs, (stage, seed))}, then start again")
    if waiting:
        stage, seed = waiting[0]
        raise UserError(
            f"reproduce: got no {', '.join(STAGES[stage])} of seed {seed} in {runs}, which {stage} needs, expected it "
            "done before, or among --stages"
        )
    print(f"{count} jobs in {(time.monotonic() - begun) / 60:.1f} minutes", flush=True)
    if runs.resolve() == results.resolve():
        return
    (results / "raw").mkdir(parents=True, exist_ok=True)
    for job in itertools.product(stages, plan.seeds):
        shutil.copy(raw(runs, job), raw(results, job))


def _may(plan: Plan, runs: Path, job: Job) -> bool:
    return all(done(plan, runs, (stage, job[1])) for stage in STAGES[job[0]])


def _log(runs: Path, job: Job) -> Path:
    return runs / "logs" / f"{job[0]}_{job[1]}.log"


def _start(job: Job, core: int, runs: Path, command: Sequence[str]) -> subprocess.Popen:
    """One core for one job: two jobs side by side waste less of two cores than one job on both."""
    path = _log(runs, job)
    path.parent.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with path.open("w") as log:
        process = subprocess.Popen(
            [*command, f"--job={job[0]}:{job[1]}"], stdout=log, stderr=subprocess.STDOUT, env=env
        )
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(process.pid, {cores[core % len(cores)]})
    return process


def python(module: str, *flags: str) -> list[str]:
    """The command that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *flags]
