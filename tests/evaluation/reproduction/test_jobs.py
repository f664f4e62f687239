"""The jobs of a reproduction: what is done, what is done anew, and what stops it."""

import dataclasses
import json
import shutil
import sys

import pytest

from molora_jax.config import UserError
from molora_jax.evaluation.reproduction import jobs, summary
from molora_jax.evaluation.reproduction.plan import QUICK, Plan

# A stand-in for the command of a job: it notes its job, and fails for the one that it is told to.
WORKER = """
import json, pathlib, sys
results, plan, bad, job = sys.argv[1:]
stage, seed = job.removeprefix("--job=").split(":")
with open(results + "/order", "a") as order:
    print(stage, seed, file=order)
if stage + seed == bad:
    sys.exit("broken")
path = pathlib.Path(results) / "runs" / "raw" / f"{stage}_{seed}.json"
path.parent.mkdir(exist_ok=True)
path.write_text(json.dumps(dict(plan=json.loads(plan), stage=stage, seed=int(seed))))
"""
PLAN = dataclasses.replace(QUICK, seeds=(3, 5))


def _run(tmp_path, plan=PLAN, bad="none", stages=("experts", "mixtures", "gates"), workers=2):
    settings = json.dumps(dataclasses.asdict(plan))
    command = [sys.executable, "-c", WORKER, str(tmp_path), settings, bad]
    jobs.run_all(plan, stages, tmp_path / "runs", tmp_path, command, workers=workers)


def _order(tmp_path):
    return (tmp_path / "order").read_text().splitlines()


def test_all_jobs_are_done_once_and_what_they_need_before(tmp_path):
    _run(tmp_path)
    order = _order(tmp_path)
    assert sorted(order) == sorted(f"{stage} {seed}" for stage in ("experts", "mixtures", "gates") for seed in (3, 5))
    for seed in (3, 5):
        assert order.index(f"experts {seed}") < order.index(f"mixtures {seed}")
    _run(tmp_path)
    assert _order(tmp_path) == order


def test_a_seed_is_done_before_the_next(tmp_path):
    _run(tmp_path, stages=("gates", "mixtures", "experts"), workers=1)
    assert _order(tmp_path) == [f"{stage} {seed}" for seed in (3, 5) for stage in ("experts", "mixtures", "gates")]


def test_results_without_their_runs_are_made_anew(tmp_path):
    _run(tmp_path, stages=("gates",))
    copies = sorted((tmp_path / "raw").iterdir())
    assert [path.name for path in copies] == ["gates_3.json", "gates_5.json"]
    shutil.rmtree(tmp_path / "runs")
    _run(tmp_path, stages=("gates",))
    assert len(_order(tmp_path)) == 4


def test_only_what_uses_the_change_is_done_anew(tmp_path):
    _run(tmp_path)
    before = len(_order(tmp_path))
    _run(tmp_path, dataclasses.replace(PLAN, gated=PLAN.gated + 1, seeds=(3,)))
    assert _order(tmp_path)[before:] == ["gates 3"]
    _run(tmp_path, dataclasses.replace(PLAN, composed=PLAN.composed + 1, seeds=(5,)))
    assert _order(tmp_path)[before + 1 :] == ["mixtures 5"]


def test_a_stage_without_what_it_needs_is_refused(tmp_path):
    with pytest.raises(UserError, match="got no experts of seed 3 in .*runs, which mixtures needs"):
        _run(tmp_path, stages=("mixtures",))


def test_results_of_different_plans_are_not_put_together(tmp_path):
    _run(tmp_path, stages=("gates",))
    assert [whole["plan"]["gated"] for whole in summary.read(tmp_path)["gates"]] == [PLAN.gated] * 2
    _run(tmp_path, dataclasses.replace(PLAN, joint=PLAN.joint + 1, gated=PLAN.gated + 1, seeds=(5,)), stages=("gates",))
    with pytest.raises(UserError, match="got gates of the seeds 3, 5 by different plans"):
        summary.read(tmp_path)
    with pytest.raises(UserError, match="got no results"):
        summary.read(tmp_path / "elsewhere")


def test_a_failure_stops_the_rest_and_is_told_where_to_look(tmp_path):
    with pytest.raises(UserError, match=r"experts of seed 3 failed; see .*experts_3.log, then start again"):
        _run(tmp_path, bad="experts3", workers=1)
    assert "broken" in (tmp_path / "runs" / "logs" / "experts_3.log").read_text()
    assert _order(tmp_path) == ["experts 3"]
    _run(tmp_path)
    assert len(_order(tmp_path)) == 7


def test_every_stage_says_what_it_uses():
    fields = {field.name for field in dataclasses.fields(Plan)}
    for stage in jobs.STAGES:
        assert set(jobs._module(stage).USES) <= fields - {"seeds"}


def test_plans_that_cannot_be():
    with pytest.raises(UserError, match="expected different ones"):
        Plan(seeds=(1, 1))
    with pytest.raises(UserError, match="got the kind 'hardest', expected some of hard, hard_dense"):
        Plan(kinds=("hard", "hardest"))
    with pytest.raises(UserError, match="expected hard among them"):
        Plan(kinds=("soft",))
