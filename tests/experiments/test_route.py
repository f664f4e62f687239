"""The command from flags to what it prints, in a process of its own."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.serving import folders

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return folders.write(tmp_path_factory.mktemp("model"))


def run(tmp_path, *flags: str, module: str = "route") -> subprocess.CompletedProcess:
    own = dict(MOLORA_CACHE=str(tmp_path), JAX_PLATFORMS="cpu")
    command = [sys.executable, "-m", f"experiments.{module}", *flags]
    return subprocess.run(command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True, check=False)


def test_a_share_a_comparison_and_a_file(folder, tmp_path):
    flags = [f"--model={folder}", "--drop_layers=1", "--stacked", "--share=0.4", "--compare", "--repeats=1", "--chat"]
    asked = ["--prompt=lazy dog", "--prompt=fox", "--max_new_tokens=12", "--temperature=0", "--batch_size=1"]
    done = run(tmp_path, *flags, *asked, f"--output={tmp_path / 'a.jsonl'}")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text("utf-8").splitlines()]
    assert [row["index"] for row in rows] == [0, 1]
    assert rows[0]["prompt"] == [{"role": "user", "content": "lazy dog"}]
    writers = [writer for row in rows for writer in row["writers"]]
    *_, legend, large, small, routed = done.stdout.splitlines()
    assert legend.endswith(f"large (^) {sum(writers)} of {len(writers)} tokens ({sum(writers) / len(writers):.1%})")
    for line, name in ((large, "large only"), (small, "small only"), (routed, "routed")):
        assert re.fullmatch(rf"{name} +[\d.]+ tokens/s +[\d.]+ ×", line)
    assert re.search(r"threshold [\d.]+: with it the large model wrote [\d.]+% of 2 answers", done.stderr)
    assert "0 programs compiled after warm-up" in done.stderr


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--knob=share=1"], "error: knob share: Deferral has no such knob, expected one of: threshold, budget"),
        (["--drop_layers=0-5"], "error: drop_layers: got 0-5, expected FIRST-LAST within 0-1, and a layer left"),
    ],
)
def test_a_wrong_flag_is_one_line(flags, line, folder, tmp_path):
    done = run(tmp_path, f"--model={folder}", "--drop_layers=1", "--prompt=a", *flags)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == line
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_table_of_programs(folder, tmp_path):
    flags = ["--drop_layers=1,0", "--programs=bernoulli,proxy-tuning,token-adapters-table", "--max_new_tokens=8"]
    done = run(tmp_path, f"--model={folder}", *flags, module="programs")
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.splitlines()
    assert header.split()[0] == "program"
    assert [row.split()[0] for row in rows] == ["bernoulli", "proxy-tuning", "token-adapters-table"]
    assert [row.split()[2] for row in rows] == ["2", "3", "1"]
    assert "0.00 / 0.00 / 1.00" in rows[1]
