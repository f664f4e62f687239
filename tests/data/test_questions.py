"""Examples by the names that users give."""

import json

import pytest

from molora_jax.config import UserError
from molora_jax.data.questions import REPORTED, questions, source
from molora_jax.data.testbed.domains import DOMAINS


def test_every_kind_of_the_testbed():
    marked = tuple(f"{name}:" for name in DOMAINS)
    for name in DOMAINS:
        assert {e.task for e in questions(f"testbed:{name}", "test", 5)} == {name}
    several, bare, mixed = (questions(f"testbed:{kind}", "test", 20) for kind in ("several", "bare", "interleaved"))
    assert all(e.prompt.startswith(marked) and "+" in e.task for e in several)
    assert not any(mark in e.prompt for e in (*bare, *mixed) for mark in marked)
    assert any("->" in e.completion.split("|")[0] for e in bare)
    assert not any("->" in e.completion.split("|")[0] for e in mixed)
    assert questions("testbed:facts", "test", 2)[0].task != "calc"


def test_what_differs_from_the_kind():
    plain = questions("testbed:list", "train", 40, signs=0.0, levels=(1,))
    assert not any(sign in e.prompt for e in plain for sign in "@#~")
    assert {e.level for e in plain} == {1}
    assert questions("testbed:list", "train", 3, seed=1) != questions("testbed:list", "train", 3)


def test_a_random_choice_of_a_benchmark_in_its_order(tmp_path):
    (tmp_path / "maths").mkdir()
    rows = [dict(question=f"{i} and {i}?", answer=f"It is.\n#### {2 * i}") for i in range(30)]
    (tmp_path / "maths" / "gsm8k_train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [int(e.answer) for e in questions("gsm8k", "train", 5, seed=3, data_dir=tmp_path)]
    assert len(found) == 5
    assert found == sorted(found)
    assert found != list(range(0, 10, 2))
    assert [int(e.answer) for e in questions("gsm8k", "train", 99, data_dir=tmp_path)] == list(range(0, 60, 2))


@pytest.fixture
def two(tmp_path):
    """Five questions of mathematics, and three sentences with secret test labels."""
    for folder in ("maths", "cola"):
        (tmp_path / folder).mkdir()
    rows = [dict(question=f"{i} and {i}?", answer=f"It is.\n#### {2 * i}") for i in range(5)]
    (tmp_path / "maths" / "gsm8k_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = ["a\t1\t\tHe is.\n", "a\t0\t*\tIs is he.\n"]
    (tmp_path / "cola" / "in_domain_dev.tsv").write_text("".join(lines))
    (tmp_path / "cola" / "out_of_domain_dev.tsv").write_text("b\t1\t\tShe is.\n")
    return tmp_path


def test_the_reported_split_is_the_test_or_where_it_is_secret_the_validation(two):
    assert {e.split for e in questions("gsm8k", REPORTED, 9, data_dir=two)} == {"test"}
    assert {e.split for e in questions("cola", REPORTED, 9, data_dir=two)} == {"validation"}
    assert questions("testbed:list", REPORTED, 3) == questions("testbed:list", "test", 3)


def test_two_benchmarks_in_a_prompt(two):
    maths, grammar = (questions(name, REPORTED, 9, data_dir=two) for name in ("gsm8k", "cola"))
    found = questions("cola+gsm8k", REPORTED, 9, data_dir=two)
    assert [e.answer for e in found] == [e.answer for e in maths]
    assert [e.id for e in found] == [f"{grammar[i % 3].id}+{e.id}" for i, e in enumerate(maths)]
    assert len({e.id for e in found}) == 5
    for i, example in enumerate(found):
        first, second = grammar[i % 3], maths[i]
        assert example.task == "gsm8k"
        assert example.prompt == f"{first.prompt}{first.completion}\n\n{second.prompt}"
        whole = example.prompt + example.completion
        texts = {span.domain: whole[span.start : span.stop] for span in example.spans}
        assert texts == {
            "cola": f"{first.prompt}{first.completion}\n\n",
            "gsm8k": second.prompt + second.completion,
        }
    with pytest.raises(UserError, match=r"data: got 'maths', expected one of gsm8k.* two as a\+b"):
        source("cola+maths", REPORTED, data_dir=two)


def test_an_unknown_name_is_one_line():
    with pytest.raises(UserError, match="data: got 'maths', expected one of gsm8k"):
        source("maths", "train")
    with pytest.raises(UserError, match="testbed: got 'maths', expected one of calc"):
        source("testbed:maths", "train")
