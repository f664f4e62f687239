"""Every domain's problems are solved as an independent reading of their text solves them."""

import dataclasses
import random
import re

import pytest

from molora_jax.config import UserError
from molora_jax.data.testbed.domains import DOMAINS, domain
from molora_jax.data.testbed.problem import HOUSE, LEVELS, RIVAL, draw, steps_of
from molora_jax.data.testbed.prompts import write
from molora_jax.data.testbed.recipe import INTERLEAVED, PRETRAINING, SEVERAL, Recipe, Stream, specialist
from molora_jax.data.testbed.verifier import JUDGE, REWARD, parse
from molora_jax.data.testbed.vocabulary import tokenizer
from tests.data.testbed import solver

SIGNS = {HOUSE: solver.HOUSE, RIVAL: solver.RIVAL}


def drawn(name, level, rule, count=150, signs=0.5):
    rng = random.Random(f"{name}{level}{rule}")
    return [draw(DOMAINS[name], rng, level, signs=signs, rule=rule) for _ in range(count)]


@pytest.mark.parametrize("rule", [HOUSE, RIVAL])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", DOMAINS)
def test_steps_and_answer_are_right(name, level, rule):
    for i, problem in enumerate(drawn(name, level, rule)):
        example = write([problem], id="x", split="train", markers=i % 2 == 0)
        got_name, start, operations = solver.split(example.prompt.rstrip("\n"))
        assert got_name == name
        assert len(operations) == steps_of(level)
        expected = solver.values(name, start, operations, SIGNS[rule])
        steps, arrow, answer = example.completion.partition(" ->")
        assert [re.split(r"=|: ", step)[-1] for step in steps.split(";")] == expected
        assert answer.strip() == example.answer == expected[-1]


@pytest.mark.parametrize("name", DOMAINS)
def test_the_rules_differ_on_signs_only(name):
    for house, rival in zip(drawn(name, 3, HOUSE, signs=0), drawn(name, 3, RIVAL, signs=0), strict=True):
        assert solver.solve(write([house], id="", split="").prompt, {}) == house.answer.strip()
        assert rival.rule == RIVAL
    differ = 0
    for problem in drawn(name, 1, HOUSE, signs=1):
        prompt = write([problem], id="", split="").prompt
        try:
            differ += solver.solve(prompt, solver.RIVAL) != problem.answer.strip()
        except IndexError:  # the rival rule may not fit a later value
            differ += 1
    assert differ > 100


def test_level_makes_problems_longer_and_wider():
    for name in DOMAINS:
        lengths = [sum(len(p.question) for p in drawn(name, level, HOUSE, signs=0)) for level in LEVELS]
        assert lengths == sorted(set(lengths))


@pytest.mark.parametrize("count", [2, 3])
def test_interleaved_problems_take_turns(count):
    rng = random.Random(count)
    for _ in range(50):
        problems = [draw(DOMAINS[name], rng, 1) for name in rng.sample(list(DOMAINS), count)]
        mixed = write(problems, id="x", split="test", markers=False, interleaved=True)
        fragments = mixed.prompt.rstrip("\n").split(" |")
        assert len(fragments) == 2 * count
        for i, problem in enumerate(problems):
            assert "".join(fragments[i::count]) == problem.question
        written = mixed.completion.split(" ->")[0].split(" |")
        for i, problem in enumerate(problems):
            assert tuple(written[i::count]) == problem.worked
        assert mixed.answer.split(" | ") == [p.answer.strip() for p in problems]
        assert JUDGE.verify([mixed.answer], [mixed.completion]) == [True]


def test_spans_cover_the_text_and_name_the_domains():
    recipe = dataclasses.replace(PRETRAINING, shares={SEVERAL: 1.0, INTERLEAVED: 1.0})
    for example in Stream(recipe, "train", 0, 100):
        text, at = example.prompt + example.completion, 0
        for span in example.spans:
            assert span.start == at
            at = span.stop
        assert at == len(text)
        told = {}
        for span in example.spans:
            told[span.domain] = told.get(span.domain, "") + text[span.start : span.stop]
        assert "+".join(told) == example.task
        for name, said in told.items():
            looks = {"calc": r"\d", "logic": r" [TF]\b", "text": r" [a-z]\b", "list": r" \d\b", "date": r"\d\d:\d\d"}
            assert re.search(looks[name], said)
            assert not re.search(looks["date"], said) or name == "date"


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("7+1=8 ->8", "8"),
        (" rev: a b -> a b", "a b"),
        ("->8\n->9", "8"),
        ("1 ->8 | rev: a -> a", "8 | a"),
        ("1=1 | x |y ->8 -> a b", "8 | a b"),
        ("7+1=8", None),
        ("7+1=8 ->", None),
        ("->8 -> ", None),
        ("7+1=8 ->8 |99 rev: x y", None),
        ("", None),
    ],
)
def test_parse(completion, expected):
    assert parse(completion) == expected


def test_rewards():
    answers, completions = ["8"] * 4, ["7+1=8 ->8", "->8", "7+1=9 ->9", "nothing"]
    assert JUDGE.rewards(answers, completions, REWARD) == pytest.approx([1.1, 1.0, 0.1, 0.0])
    assert JUDGE.verify(["8"], ["7+1=8 ->8 ->8"]) == [False]


@pytest.mark.parametrize("name", [*DOMAINS, SEVERAL, INTERLEAVED, "facts"])
def test_examples_fit_in_128_tokens(name):
    recipe = Recipe(shares={name: 1.0}, levels=LEVELS, rival=0.5, bare=0.2)
    text = tokenizer()
    for example in Stream(recipe, "train", 1, 1000):
        tokens = text.encode(example.prompt) + text.encode(example.completion, special=False)
        assert len(tokens) + 1 <= 128


def test_a_stream_is_the_same_at_every_reading():
    stream = Stream(PRETRAINING, "train", 3, 50)
    assert [stream[i] for i in reversed(range(50))][::-1] == list(stream)
    assert stream[0] != Stream(PRETRAINING, "train", 4, 50)[0]
    assert len({example.id for example in stream}) == len(stream) == 50
    with pytest.raises(IndexError):
        stream[50]


def test_streams_do_not_change_between_versions_of_python():
    prompts = [Stream(specialist(name), "test", 0, 3)[2].prompt for name in DOMAINS]
    assert prompts == [
        "64 *2 +08 *2\n",
        "logic: F F T T, xor T F T F, ~, not\n",
        " b f n j y, twice, turn, next\n",
        "list: 9 4 7 2 2, sort, sort, rev\n",
        "date: Thu 21:00, add 01 h, back 02 d, back 03 d\n",
    ]


def test_wrong_names_end_in_one_line():
    with pytest.raises(UserError, match="'maths', expected one of calc, logic"):
        domain("maths")
    with pytest.raises(UserError, match="split 'dev', expected one of train"):
        Stream(PRETRAINING, "dev", 0, 1)
    with pytest.raises(UserError, match="maths"):
        Recipe(shares={"maths": 1.0})
    with pytest.raises(UserError, match="levels"):
        Recipe(shares={"calc": 1.0}, levels=(1, 5))
