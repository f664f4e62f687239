"""What is saved comes back to the bit, and a save that fails leaves the checkpoints before it as they are."""

import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from molora_jax.checkpoints.store import Store
from molora_jax.config import UserError
from tests.checkpoints.store_worker import arrays

ROOT = pathlib.Path(__file__).parents[2]

MIXED = {
    "trained/bank.layers.attn.q_proj.a": jnp.asarray(np.random.default_rng(0).standard_normal((2, 3)), jnp.float32),
    "optimiser/1.mu/x": jnp.asarray([1.5, -0.0, jnp.inf], jnp.bfloat16),
    "step": jnp.int32(7),
    "key": jax.random.key_data(jax.random.key(3)),
    "none": jnp.zeros((0, 4)),
    "halted": jnp.asarray(True),
}


def bits(leaf) -> bytes:
    return np.asarray(leaf).tobytes()


def test_arrays_and_json_come_back_to_the_bit(tmp_path):
    extra = {"data": {"epoch": 3, "held": [1, 2], "name": "größer"}, "flag": None}
    with Store(tmp_path / "new" / "run") as store:
        store.save(7, MIXED, extra)
    step, got, about = Store(tmp_path / "new" / "run").restore(MIXED)
    assert (step, about) == (7, extra)
    assert {k: (v.shape, v.dtype) for k, v in got.items()} == {k: (v.shape, v.dtype) for k, v in MIXED.items()}
    assert {k: bits(v) for k, v in got.items()} == {k: bits(v) for k, v in MIXED.items()}
    assert got["optimiser/1.mu/x"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(("best", "kept"), [("lowest", 2), ("highest", 1)])
def test_the_newest_and_the_best_stay_also_after_a_restart(tmp_path, best, kept):
    one = {"x": jnp.zeros(1)}
    for part in ((1, 5.0), (2, 1.0), (3, 2.0)), ((4, None), (5, 3.0), (6, None)):
        with Store(tmp_path, keep_last=2, best=best) as store:
            for step, score in part:
                store.save(step, one, step, score=score)
    store = Store(tmp_path, best=best)
    assert (store.steps, store.best, store.latest) == ((kept, 5, 6), kept, 6)
    assert store.restore(one, store.best)[2] == kept


def test_a_step_that_is_there_stays_as_it_is(tmp_path):
    with Store(tmp_path) as store:
        store.save(1, {"x": jnp.zeros(1)})
        store.wait()
        store.save(1, {"x": jnp.ones(1)})
    np.testing.assert_array_equal(Store(tmp_path).restore({"x": jnp.zeros(1)})[1]["x"], 0)


def test_what_is_donated_right_after_saving_is_saved_as_it_was(tmp_path):
    change = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    x = jnp.arange(2_000_000, dtype=jnp.float32)
    with Store(tmp_path) as store:
        for step in range(3):
            y = x + step
            store.save(step, {"x": y})
            for _ in range(4):
                y = change(y)
    for step in store.steps:
        np.testing.assert_array_equal(Store(tmp_path).restore({"x": x}, step)[1]["x"], np.arange(2_000_000) + step)


def worker(folder, how: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.checkpoints.store_worker", str(folder), how]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_process_killed_in_the_middle_of_a_save_leaves_whole_checkpoints(tmp_path):
    process = worker(tmp_path, "forever")
    while not process.stdout.readline().startswith("2"):  # two are whole by then, the third is being written
        assert process.poll() is None, process.stderr.read()
    unfinished = lambda: [path.name for path in tmp_path.iterdir() if not path.name.isdigit()]
    deadline = time.monotonic() + 60
    while not unfinished() and time.monotonic() < deadline:
        pass
    process.kill()
    process.communicate()
    assert unfinished(), "killed too late to see anything"
    with Store(tmp_path) as store:
        assert len(store.steps) >= 2
        for step in store.steps:
            _, got, extra = store.restore(arrays(0), step)
            assert extra == dict(step=step)
            jax.tree.map(np.testing.assert_array_equal, got, arrays(step))
        again = int(unfinished()[0].split(".")[0])
        store.save(again, arrays(again))
    assert not unfinished()
    assert store.latest == again


def test_a_full_disk_is_one_line_and_the_last_good_checkpoint_stays(tmp_path):
    process = worker(tmp_path, "full")
    _, errors = process.communicate(timeout=300)
    lines = [line for line in errors.splitlines() if not line.startswith("WARNING: All log messages")]
    assert process.returncode == 1
    assert lines == [
        f"error: checkpoint: got 'File too large' writing to {tmp_path}, expected a folder with room; "
        "make room or choose another; the last good checkpoint is step 1"
    ]
    store = Store(tmp_path)
    assert store.steps == (1,)
    jax.tree.map(np.testing.assert_array_equal, store.restore(arrays(0))[1], arrays(1))


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="got '(Not a directory|File exists)' writing to .*file/run") as caught:
        Store(tmp_path / "file" / "run")
    assert "\n" not in str(caught.value)


REFUSED = {
    "another name": (dict(y=jnp.zeros(2)), "x is in the checkpoint alone; resume with the settings of that run"),
    "one more": (dict(x=jnp.zeros(2), y=jnp.zeros(1)), "y is not in the checkpoint"),
    "another shape": (dict(x=jnp.zeros(3)), r"got x \[\[2\], 'float32'\], expected \[\[3\], 'float32'\]"),
    "another dtype": (dict(x=jnp.zeros(2, jnp.bfloat16)), r"expected \[\[2\], 'bfloat16'\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_checkpoint_of_another_run_is_refused(tmp_path, case):
    like, message = REFUSED[case]
    with Store(tmp_path) as store:
        store.save(1, {"x": jnp.zeros(2)})
        store.wait()
        with pytest.raises(UserError, match=message):
            store.restore(like)


def test_a_step_that_is_not_there_is_refused(tmp_path):
    with Store(tmp_path) as store:
        with pytest.raises(UserError, match="got step None of .*, expected one of those there: none"):
            store.restore({})
        store.save(1, {"x": jnp.zeros(2)})
        store.wait()
        with pytest.raises(UserError, match="got step 4 of .*, expected one of those there: 1"):
            store.restore({"x": jnp.zeros(2)}, 4)
    with pytest.raises(UserError, match="got keep_last=0"):
        Store(tmp_path, keep_last=0)
