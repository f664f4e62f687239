"""The training benchmark on a tiny base: it measures every candidate that is installed, and says what it compares."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from experiments.train_costs import worker
from tests.training import tiny

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_a_step_is_measured_beside_the_peers_that_are_installed(tmp_path):
    base = tiny.base(tmp_path / "base")
    command = [sys.executable, "-m", "experiments.bench_train", f"--model={base}", "--rows=2", "--length=16", "--quick"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MOLORA_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    summary = dict(item.split("=") for item in done.stdout.splitlines()[-1].split()[1:])
    peers = {"speedup_train", "cpu_saving_train", "memory_ratio_train", "memory_ratio_remat"}
    assert set(summary) == {"overhead_malora_step"} | (peers if worker.has("peft") else set())
    assert worker.has("peft") or "peft: left out" in done.stdout
    rows = json.loads((tmp_path / "results/bench/train.json").read_text())["rows"]
    assert all(row["step_s"] > 0 and row["peak_mib"] > 0 for row in rows)
    assert float(summary["overhead_malora_step"]) > 0
