"""From the command line: an expert by reinforcement, its report, and one line for a mistake."""

import json

import pytest

from configs import rlvr_gsm8k, rlvr_testbed
from molora_jax.data.document import from_example
from molora_jax.data.questions import source
from molora_jax.data.testbed import vocabulary
from molora_jax.data.testbed.domains import DOMAINS
from molora_jax.training import rlvr_settings, settings
from molora_jax.training.rlvr_settings import RLVRConfig
from tests.experiments.test_train import run
from tests.training import tiny

FEW = ("sft_steps=0", "steps=2", "prompts=2", "per_prompt=2", "problems=3", "adapter.rank=2")


@pytest.mark.slow
def test_one_command_gives_an_expert_and_its_report(tmp_path):
    base, out = tiny.base(tmp_path / "base"), tmp_path / "run"
    changes = [f"--config.{change}" for change in (*FEW, f"model={base}")]
    done = run("rlvr", "--config=configs/rlvr_testbed.py:calc", f"--out={out}", *changes, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "testbed:calc: greedy, 0 % (0–56) right before, 0 % (0–56) after" in done.stdout
    assert json.loads((out / "report.json").read_text())["rollouts"] == 8
    assert {"adapter", "reward.png", "metrics.jsonl"} <= {path.name for path in out.iterdir()}


WRONG = {
    "no config": ([], "error: config: got none, expected --config=configs/rlvr_testbed.py:calc"),
    "a domain": (["--config=configs/rlvr_testbed.py:maths"], "error: flags: config: got 'maths', expected one of calc"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_line(case, tmp_path):
    arguments, message = WRONG[case]
    done = run("rlvr", f"--out={tmp_path / 'run'}", *arguments, cache=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(message), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", DOMAINS)
def test_every_domain_has_room_for_its_prompts_and_solutions(name):
    config, tokenizer = rlvr_settings.testbed(name), vocabulary.tokenizer()
    assert settings.frozen(rlvr_testbed.get_config(name), RLVRConfig) == config
    found = source(config.data, "test")
    for example in (found[i] for i in range(300)):
        asked = len(tokenizer.encode(example.prompt))
        assert asked <= config.length - config.max_new_tokens
        assert len(from_example(tokenizer, example)) - asked <= config.max_new_tokens


def test_the_settings_for_real_mathematics_are_settings():
    assert settings.frozen(rlvr_gsm8k.get_config(), RLVRConfig).data == "gsm8k"
