"""The report of a run of reinforcement."""

import json

import pytest

from molora_jax.config import UserError
from molora_jax.evaluation import rlvr
from molora_jax.training.grpo import Result
from molora_jax.training.rlvr_settings import RLVRConfig


def test_it_says_what_changed_and_how_sure_that_is(tmp_path):
    config = RLVRConfig(data="testbed:list", steps=3, prompts=4, per_prompt=2)
    said = rlvr.report(config, Result(tmp_path / "adapter", 0, 8, 5, 10, 10, 1.26), tmp_path)
    greedy, sampled = "0 % (0–28) right before, 80 % (49–94) after", "50 % (24–76) right before, 100 % (72–100) after"
    assert said == f"testbed:list: greedy, {greedy}; sampled, {sampled}; {tmp_path / 'report.json'}"
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["before"] == dict(right=0, share=0.0, low=0.0, high=0.2775)
    assert found["after"] == dict(right=8, share=0.8, low=0.4902, high=0.9433)
    assert (found["sampled_before"]["right"], found["sampled_after"]["right"]) == (5, 10)
    assert (found["rollouts"], found["problems"], found["seconds"]) == (24, 10, 1.3)
    with pytest.raises(UserError, match="expected a folder with room"):
        rlvr.report(config, Result(tmp_path / "adapter", 0, 8, 5, 10, 10, 1.26), tmp_path / "nowhere")
