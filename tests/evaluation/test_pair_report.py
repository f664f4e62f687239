"""Tables and files of a routed pair, from numbers that are made up."""

import json

import numpy as np
import pytest

from molora_jax.config import UserError
from molora_jax.evaluation import bootstrap, pair_report
from molora_jax.evaluation.accuracy import Accuracy
from molora_jax.evaluation.pair import QUESTION, RANDOM, TRAINED

N = 20


def measured(right, realised: float, speed: float) -> dict:
    accuracy = Accuracy(int(sum(right)), N).values
    return dict(right=[int(r) for r in right], accuracy=accuracy, realised=realised, tokens_per_s=speed)


def made_up(seed: int, shares=(0.1, 0.2)) -> dict:
    rng = np.random.default_rng(seed)
    rows = [
        dict(router=router, share=share, **measured(rng.random(N) < share + 0.3 * (router == TRAINED), share, 100.0))
        for share in shares
        for router in pair_report.NAMES
    ]
    ends = dict(small=measured([0] * N, 0.0, 200.0), large=measured([1] * N, 1.0, 50.0))
    return dict(rows=rows, ends=ends)


def right(run: dict, router: str, share: float) -> np.ndarray:
    (own,) = [row["right"] for row in run["rows"] if row["router"] == router and row["share"] == share]
    return np.array(own, float)


def test_a_difference_is_paired_over_seeds_and_questions():
    runs = [made_up(0), made_up(1)]
    ours, theirs = (np.stack([right(run, router, 0.2) for run in runs]) for router in (TRAINED, RANDOM))
    assert pair_report.difference(runs, TRAINED, RANDOM, 0.2) == bootstrap.paired(ours, theirs)
    assert pair_report.accuracy_at(runs, TRAINED, 0.2) == pytest.approx(ours.mean())


def test_table_of_one_run():
    lines = pair_report.table([made_up(0)]).splitlines()
    assert lines[2] == "| small model | 0 | 0.000 | 0 % (0–16) |  | 200 |"
    assert lines[-1] == "| large model | 1 | 1.000 | 100 % (84–100) |  | 50 |"
    assert len(lines) == 2 + 2 + 2 * 4
    (own,) = [line for line in lines if line.startswith("| random tokens | 0.2")]
    solved = int(right(made_up(0), RANDOM, 0.2).sum())
    assert own == f"| random tokens | 0.2 | 0.200 | {Accuracy(solved, N)} |  | 100 |"


def test_table_of_several_runs():
    runs = [made_up(seed) for seed in range(3)]
    (own,) = [
        line for line in pair_report.table(runs).splitlines() if line.startswith("| whole questions, trained | 0.1")
    ]
    solved = [100 * right(run, QUESTION, 0.1).mean() for run in runs]
    gap = pair_report.difference(runs, QUESTION, RANDOM, 0.1)
    assert f"| {np.mean(solved):.1f} ± {np.std(solved, ddof=1):.1f} |" in own
    assert f"| {100 * gap.mean:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f}) |" in own


def test_files(tmp_path):
    pytest.importorskip("matplotlib", reason="draws the plots: pip install 'molora_jax[bench]'")
    runs = [made_up(0), made_up(1)]
    pair_report.write(tmp_path / "new" / "pair", runs)
    folder = tmp_path / "new" / "pair"
    assert (folder / "table.md").read_text() == pair_report.table(runs) + "\n"
    assert json.loads((folder / "pair.json").read_text())["runs"] == runs
    assert all((folder / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in ("accuracy", "speed"))


def test_runs_that_do_not_fit_together_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"pair: got runs at the shares \[\[0.1, 0.2\], \[0.1\]\], expected the same"):
        pair_report.table([made_up(0), made_up(1, shares=(0.1,))])
    with pytest.raises(UserError, match="pair: got 0 of 1 runs with r2r at 0.5, expected all"):
        pair_report.points([made_up(0)], TRAINED, 0.5)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="pair: got 'Not a directory' writing to"):
        pair_report.write(tmp_path / "file" / "pair", [made_up(0)])
