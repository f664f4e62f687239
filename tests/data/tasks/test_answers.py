"""Answers are read off completions of many forms, and only where they leave no doubt."""

import pytest

from molora_jax.data.tasks import answers
from molora_jax.data.tasks.arc import ARC
from molora_jax.data.tasks.boolq import BOOLQ
from molora_jax.data.tasks.cola import COLA
from molora_jax.data.tasks.gsm8k import GSM8K
from molora_jax.data.tasks.reward import EXACT, RELEASED


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ('{"answer": "B"}', "B"),
        ('<think>{"answer": "A"}</think> {"answer": "B"} ok', "B"),
        ('{"answer": 18}', "18"),
        ('{"answer": 1.5, "why": {"x": 1}}', "1.5"),
        ('{"answer": true}', "true"),
        ('{"why": {"answer": "C"}}', "C"),
        ('{"answer": null}', None),
        ('{"answer": ["B"]}', None),
        ('{"answer": "B"', None),
        ('{"Answer": "B"}', None),
        ("{" * 100_000, None),
        ("", None),
    ],
)
def test_json(completion, expected):
    assert answers.from_json(completion) == expected
    assert answers.valid(completion) == (expected is not None)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (r"so \boxed{\frac{1}{2}} or \boxed{7", r"\frac{1}{2}"),
        (r"\boxed{3} then \boxed{4}", "4"),
        (r'\boxed{3} {"answer": "5"}', "5"),
        ("x\n#### 1,234\n", "1,234"),
        ("The answer is $1,234.50 in all, not 7", "$1,234.50"),
        ("answer: -3", "-3"),
        ("The answer is **20%**.", "20"),
        ("The answer is 18, so he pays 2", "18"),
        ("The answer is **18**.", "18"),
        ("**Answer: 18**", "18"),
        ("*The answer is $18*", "$18"),
        (r"The answer is $-5$", "$-5"),
        (r"The answer is \(18\).", "18"),
        ("The answer is 1/2", None),
        ("The answer is 5 1/2", None),
        (r"The answer is $3 \times 6$", None),
        ("The answer is 3 x 6", None),
        ("The answer is 2**3", None),
        ("The answer is 3e5", None),
        (r"The answer is $\frac{18}{5}$", None),
        ("The answer is .5", None),
        ("The answer is −5", None),
        ("The answer is 12.5/5", None),
        ("The answer is 20 - 5", None),
        ("the answer is 3*6", None),
        ("about 12", None),
    ],
)
def test_mathematical(completion, expected):
    assert answers.mathematical(completion) == expected


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ('{"answer": "b"}', True),
        ("I think the answer is (B).", True),
        ("Answer: **B**", True),
        ("The answer is A. No, the answer is B", True),
        ("b", True),
        ("B.", True),
        ("the answer is b flat", False),
        ("Both B and C", False),
        ('the answer is B {"answer": "A"}', False),
    ],
)
def test_letters(completion, right):
    assert ARC.judge.verify(["B"], [completion]) == [right]


def test_a_sentence_does_not_choose_a():
    assert ARC.judge.verify(["A"], ["The answer is a frog"]) == [False]


def test_words():
    assert BOOLQ.judge.verify(["yes"] * 4, ['{"answer": "Yes"}', '{"answer": true}', "Yes.", "the answer is no"]) == [
        True,
        True,
        True,
        False,
    ]
    assert COLA.judge.verify(["acceptable"] * 2, ["Acceptable", "unacceptable"]) == [True, False]


def test_released_reward():
    completions = [
        '<think>2+2</think>{"answer": "4"}',
        '{"answer": "4"}',
        '<think>2+2</think>{"answer": "5"}',
        "<think>2+2</think> five",
        '<think> </think>{"answer": "5"}',
        "",
    ]
    rewards = GSM8K.judge.rewards(["4"] * 6, completions, RELEASED)
    assert rewards == pytest.approx([1.2, 1.0, -0.8, -0.9, -1.0, -1.1])
    assert GSM8K.judge.rewards(["4"] * 6, completions, EXACT) == [1, 1, 0, 0, 0, 0]
    assert GSM8K.judge.rewards([], [], EXACT) == []
