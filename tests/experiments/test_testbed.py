"""The command that makes the testbed's bases, for a few steps."""

import json
import pathlib
import subprocess
import sys

import pytest

from molora_jax.checkpoints import model as models
from molora_jax.training.pretrain import BASES

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_a_base_of_a_few_steps(tmp_path):
    flags = ["--bases=small", "--steps=3", "--problems=4", f"--output={tmp_path}", f"--runs={tmp_path / 'runs'}"]
    command = [sys.executable, "-m", "experiments.testbed", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "| calc | 0 % (0–49) | 0 % (0–49) |" in done.stdout
    made = models.load(str(tmp_path / "small"))
    assert made.cfg == BASES["small"].model
    record = json.loads((tmp_path / "small" / "testbed.json").read_text())
    assert record["settings"]["steps"] == 3
    assert record["accuracy"]["tasks"]["date"]["n"] == 4
    lines = (tmp_path / "runs" / "small" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 3


def test_an_unknown_base():
    command = [sys.executable, "-m", "experiments.testbed", "--bases=huge"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == "error: bases: got huge, expected some of small, large"
