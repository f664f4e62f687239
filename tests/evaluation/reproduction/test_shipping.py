"""What of a reproduction goes into the package."""

import dataclasses

import pytest

from molora_jax.config import UserError
from molora_jax.evaluation.reproduction.plan import QUICK, SINGLE
from molora_jax.evaluation.reproduction.shipping import ship


def test_what_is_shipped_replaces_what_was_there(tmp_path):
    plan, runs, package = dataclasses.replace(QUICK, gate_domains=("text",)), tmp_path / "runs", tmp_path / "parts"
    parts = {name: f"{name}/adapter" for name in SINGLE} | {name: name for name in ("malora-text", "r2r")}
    parts |= {f"hard/{part}": f"hard/{part}" for part in ("router", "attention")}
    for name, source in parts.items():
        (runs / "seed3" / source).mkdir(parents=True)
        (runs / "seed3" / source / "new").write_text(name)
        (package / name).mkdir(parents=True)
        (package / name / "old").write_text(name)
    (runs / "seed3" / "control" / "adapter").mkdir(parents=True)
    assert sorted(ship(plan, runs, 3, package)) == sorted(package / name for name in parts)
    for name in parts:
        assert [path.name for path in (package / name).iterdir()] == ["new"]
        assert (package / name / "new").read_text() == name
    assert sorted(path.name for path in package.iterdir()) == sorted([*SINGLE, "hard", "malora-text", "r2r"])


def test_a_stage_that_is_missing_changes_nothing(tmp_path):
    with pytest.raises(UserError, match=r"ship: got no .*calc.*, expected experts, mixtures, gates and pair of"):
        ship(QUICK, tmp_path, 0, tmp_path / "parts")
    assert not (tmp_path / "parts").exists()
