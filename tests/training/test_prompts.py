"""Examples by name, and a stream of prompts that can be left and taken up again."""

import json

import pytest

from molora_jax.config import UserError
from molora_jax.data.questions import source
from molora_jax.data.tasks import registry
from molora_jax.training import sft
from molora_jax.training.prompts import Prompts, reward
from tests.training import tiny


def test_a_domain_of_the_testbed_has_splits_of_other_problems():
    splits = {split: source("testbed:list", split) for split in ("train", "validation", "test")}
    texts = {split: {found[i].prompt for i in range(200)} for split, found in splits.items()}
    assert not texts["train"] & texts["test"]
    assert not texts["validation"] & texts["test"]
    assert {found[3].task for found in splits.values()} == {"list"}
    assert any("@" in text or "~" in text or "#" in text for text in texts["train"])
    with pytest.raises(UserError, match="testbed: got 'maths', expected one of calc"):
        source("testbed:maths", "train")


def test_a_benchmark_is_read_from_its_files(tmp_path):
    (tmp_path / "maths").mkdir()
    rows = [dict(question=f"{i} and {i}?", answer=f"It is.\n#### {2 * i}") for i in range(3)]
    (tmp_path / "maths" / "gsm8k_train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = source("gsm8k", "train", data_dir=str(tmp_path))
    assert [example.answer for example in found] == ["0", "2", "4"]
    assert registry.judge(found[0]) is registry.task("gsm8k").judge


def test_prompts_come_once_each_time_round_and_in_another_order():
    prompts = Prompts(list(range(7)), seed=3)
    rounds = [prompts.take(7) for _ in range(3)]
    assert all(sorted(own) == list(range(7)) for own in rounds)
    assert len({tuple(own) for own in rounds}) == 3
    assert Prompts(list(range(7)), seed=4).take(7) != rounds[0]


def test_prompts_go_on_where_they_were_left():
    prompts = Prompts(list(range(5)), seed=0)
    prompts.take(8)
    state = json.loads(json.dumps(prompts.get_state()))
    rest = prompts.take(9)
    other = Prompts(list(range(5)), seed=0)
    other.set_state(state)
    assert other.take(9) == rest


def test_a_supervised_run_takes_a_domain_of_the_testbed(tmp_path):
    config = tiny.config(tmp_path, data="testbed:calc", held_out=4, length=64)
    said = []
    train, held = sft.documents(config, sft.load(config)[0].tokenizer, said.append)
    assert len(train) > 10_000
    assert [document.id for document in held] == [f"calc/validation/0/{i}" for i in range(4)]
    assert train[2].id == "calc/train/0/2"
    assert train[2].weights[-1] == 1
    assert said == ["data: testbed:calc, problems drawn as they are needed, 4 others held out"]


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match="reward: got 'gold', expected one of testbed, exact, released"):
        reward("gold")
    with pytest.raises(UserError, match="prompts: got no example"):
        Prompts([], seed=0)
