"""The loop: what it writes, evaluates and keeps, and when it stops."""

import json
import sys

import numpy as np
import pytest

from molora_jax.checkpoints.store import Store
from molora_jax.config import UserError
from molora_jax.training.loop import LoopConfig, held_out, run
from molora_jax.training.metrics import FILE
from tests.training import toy
from tests.training.loop_worker import Rows, trainer


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def go(steps: int, folder=None, *, rows=None, evaluate=None, progress=False, **config):
    return run(
        trainer(),
        rows or Rows(),
        LoopConfig(steps=steps, **config),
        folder=folder,
        evaluate=evaluate,
        progress=progress,
    )


def test_without_a_folder_it_only_trains():
    made, state = trainer(), go(3)
    want = made.init()
    for i in range(3):
        want, _ = made.step(want, toy.rows(i + 1))
    np.testing.assert_array_equal(state.trained["adapter.add"], want.trained["adapter.add"])
    assert state.step == 3


def test_numbers_go_to_jsonl_and_to_the_terminal(tmp_path, capsys):
    made = trainer()
    evaluate = held_out(made, lambda: [toy.rows(9)])
    go(5, tmp_path, evaluate=evaluate, log_every=2, evaluate_every=3, progress=True)
    steps = [(line["step"], "eval_loss" in line) for line in lines(tmp_path)]
    assert steps == [(0, True), (2, False), (3, True), (4, False), (5, False), (5, True)]
    assert {"loss", "weight", "grad_norm", "tokens_per_second"} <= set(lines(tmp_path)[1])
    shown = capsys.readouterr().err
    assert "5/5" in shown
    assert "loss=" in shown


def test_numbers_go_to_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    go(2, tmp_path, log_every=1)
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"grad_norm" in events.read_bytes()


def test_without_tensorboard_one_line_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    go(1, tmp_path)
    assert capsys.readouterr().err == (
        "tensorboard: no files for it, tensorboardX is not installed: pip install 'molora_jax[train]'\n"
    )


def test_a_held_out_loss_is_the_mean_over_all_its_tokens():
    made = trainer()
    batches = [toy.rows(1), toy.rows(2, count=2)]
    got = held_out(made, lambda: batches)(made.init())
    sums = [made.sums(made.init(), b) for b in batches]
    np.testing.assert_allclose(got["loss"], sum(s.loss for s in sums) / sum(s.weight for s in sums), rtol=1e-6)


def test_the_best_and_the_last_checkpoint_are_kept(tmp_path):
    scores = iter([0.5, 3.0, 1.0, 2.0, 5.0])
    go(8, tmp_path, evaluate=lambda state: {"loss": next(scores)}, evaluate_every=2, keep_last=1)
    store = Store(tmp_path / "checkpoints")
    assert (store.steps, store.best) == ((4, 8), 4)


def test_a_finished_run_that_is_started_again_does_nothing(tmp_path):
    go(4, tmp_path, log_every=1)
    before = lines(tmp_path)
    rows = Rows()
    state = go(4, tmp_path, rows=rows, log_every=1)
    assert state.step == 4
    assert rows.at == 4
    assert lines(tmp_path) == before


def test_a_longer_run_goes_on_with_the_data_where_it_stopped(tmp_path):
    rows = Rows(as_bytes=True)
    go(3, tmp_path, rows=rows)
    rows = Rows(as_bytes=True)
    go(5, tmp_path, rows=rows, log_every=1)
    assert rows.at == 5
    assert [line["step"] for line in lines(tmp_path)] == [3, 4, 5]


def test_a_run_that_has_gone_further_is_not_taken_for_a_shorter_one(tmp_path):
    go(4, tmp_path)
    with pytest.raises(UserError, match="got 3 steps for a run in .* that has made 4, expected as many at least"):
        go(3, tmp_path)
    assert go(4, tmp_path).step == 4


def test_lines_of_steps_that_are_done_again_are_taken_out(tmp_path):
    go(3, tmp_path, log_every=1)
    with (tmp_path / FILE).open("a") as file:
        file.write(json.dumps(dict(step=4, loss=0.0)) + "\n" + '{"step": 5, "lo')
    go(4, tmp_path, log_every=1)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert lines(tmp_path)[-1]["loss"] > 0


def test_it_stops_at_a_loss_that_is_not_finite_and_names_the_examples(tmp_path):
    message = (
        r"got loss nan and gradient norm nan at step 4, expected finite ones; its batch holds "
        r"row 4.0, row 4.1, row 4.2, row 4.3; nothing was updated: look at these examples, or lower the learning rates"
    )
    with pytest.raises(UserError, match=message):
        go(9, tmp_path, rows=Rows(poison=4), log_every=1, save_every=2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    assert Store(tmp_path / "checkpoints").steps == (2,)


def test_it_stops_where_the_data_ends():
    with pytest.raises(UserError, match="the data ended before step 3 of 4; give more epochs"):
        go(4, rows=Rows(end=2))


REFUSED = {
    "no steps": (lambda: LoopConfig(steps=0), "expected at least one step"),
    "no score": (
        lambda: go(1, evaluate=lambda state: {"accuracy": 1}, evaluate_every=1),
        r"got an evaluation of \['accuracy'\], expected 'loss' among it",
    ),
    "a score that is none": (
        lambda: go(1, evaluate=lambda state: {"loss": float("nan")}, evaluate_every=1),
        "got loss nan in the evaluation at step 0",
    ),
    "nothing held out": (lambda: held_out(trainer(), lambda: [])(None), "got no token that counts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case):
    make, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        make()
