"""A run that is killed, at any step or in the middle of a save, ends with the losses and weights of one that is not."""

import json
import pathlib
import random
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from molora_jax.checkpoints.store import Store
from molora_jax.training import resume
from molora_jax.training.metrics import FILE, Log
from tests.training import toy
from tests.training.loop_worker import STEPS, trainer

ROOT = pathlib.Path(__file__).parents[2]


def start(folder: pathlib.Path, pause: float) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.training.loop_worker", str(folder), str(pause)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> None:
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors


def kill_when(process: subprocess.Popen, happened) -> None:
    while not happened():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.0005)
    process.kill()
    process.communicate()
    assert process.returncode == -9, "it ended before it was killed"


def records(folder: pathlib.Path) -> list[dict]:
    lines = (folder / FILE).read_text().splitlines() if (folder / FILE).exists() else []
    timeless = lambda record: {key: value for key, value in record.items() if key != "tokens_per_second"}
    return [timeless(json.loads(line)) for line in lines if line.endswith("}")]


def final(folder: pathlib.Path) -> dict[str, np.ndarray]:
    with Store(folder / "checkpoints") as store:
        assert store.latest == STEPS
        return jax.tree.map(np.asarray, resume.arrays(resume.restore(store, trainer().init())[1]))


@pytest.mark.slow
def test_a_run_killed_at_random_steps_and_during_a_save_ends_the_same_to_the_bit(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(start(whole, 0))
    steps = sorted(random.Random(time.time_ns()).sample(range(2, STEPS - 3), 3))
    for step in steps:
        reached = lambda step=step: any(r["step"] >= step for r in records(broken))
        kill_when(start(broken, 0.05), reached)
    checkpoints = broken / "checkpoints"
    before = {path.name for path in checkpoints.iterdir()}
    saving = lambda: any("-tmp" in path.name and path.name not in before for path in checkpoints.iterdir())
    kill_when(start(broken, 0.05), saving)
    finish(start(broken, 0))
    assert records(broken) == records(whole), f"killed at {steps}"
    assert [r["step"] for r in records(whole) if "loss" in r] == list(range(1, STEPS + 1))
    jax.tree.map(np.testing.assert_array_equal, final(broken), final(whole))


def test_a_state_goes_into_arrays_and_back(tmp_path):
    made = trainer()
    state, _ = made.step(made.init(), toy.rows())
    with Store(tmp_path) as store:
        resume.save(store, 1, state, b"\x00\xff anything")
        store.wait()
        step, back, position = resume.restore(store, made.init())
    assert (step, position) == (1, b"\x00\xff anything")
    words = lambda state: jax.tree.map(np.asarray, resume.arrays(state))
    jax.tree.map(np.testing.assert_array_equal, words(back), words(state))
    after = [made.step(s, toy.rows(1))[1] for s in (back, state)]
    jax.tree.map(np.testing.assert_array_equal, *after)


def test_a_run_that_begins_anew_keeps_no_line_of_one_that_saved_nothing(tmp_path):
    for loss in (3.0, 2.0):
        with Log(tmp_path, steps=5, progress=False) as log:
            log.write(0, dict(loss=loss), prefix="eval_")
    assert records(tmp_path) == [{"step": 0, "eval_loss": 2.0}]
    with Log(tmp_path, steps=5, start=1, progress=False):
        assert records(tmp_path) == [{"step": 0, "eval_loss": 2.0}]
