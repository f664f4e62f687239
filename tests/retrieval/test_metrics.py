"""Answers and evidence score as the official scripts score them: by hand, by property, and re-derived."""

import dataclasses
import re
import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molora_jax.config import UserError
from molora_jax.retrieval import metrics
from molora_jax.retrieval.metrics import ZERO, Score
from tests.retrieval.questions import question

SETS = ("hotpotqa", "2wikimultihopqa", "musique")
WORDS = st.sampled_from(["a", "The", "yes", "no", "noanswer", "Ada,", "ben", "cleo", "U.S.", "--"])
TEXTS = st.lists(WORDS, max_size=5).map(" ".join)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat!", "cat"),
        ("U.S.A.", "usa"),
        ("a-b", "ab"),  # the hyphen goes before articles are looked for
        ("A. the", ""),
        ("An 'apple' a day", "apple day"),
        ("other than", "other than"),  # no article within a word
        ("Café – the", "café –"),  # the en dash is no ASCII punctuation
        ("a\tb\nc", "b c"),
    ],
)
def test_normalisation_goes_case_punctuation_articles_spaces(text, normal):
    assert metrics.normalise(text) == normal


@pytest.mark.parametrize(
    ("dataset", "gold", "aliases", "said", "expected"),
    [
        ("hotpotqa", "Ada Lovelace", (), "the Ada Lovelace", Score(1, 1, 1, 1)),
        ("hotpotqa", "Ada Lovelace", (), "Ada King Noel", Score(0, 0.4, 1 / 3, 0.5)),
        ("hotpotqa", "Cleo", ("Tom",), "Tom", ZERO),  # no aliases in HotpotQA
        ("2wikimultihopqa", "Cleo", ("Tom",), "Tom", Score(1, 1, 1, 1)),
        ("musique", "Cleo", ("Tom",), "Tom", Score(1, 1, 1, 1)),
        ("hotpotqa", "yes", (), "yes it is", ZERO),
        ("2wikimultihopqa", "no one", (), "no", ZERO),
        ("musique", "yes", (), "yes it is", Score(0, 0.5, 1 / 3, 1)),  # no yes/no rule in MuSiQue
        ("hotpotqa", "yes", (), "Yes.", Score(1, 1, 1, 1)),
        ("hotpotqa", "the", (), "", Score(1, 0, 0, 0)),  # both empty once normalised
        ("musique", "the", (), "", Score(1, 1, 1, 1)),
        ("musique", "the", (), "cat", ZERO),
        ("musique", "cat cat dog", (), "cat dog dog", Score(0, 2 / 3, 2 / 3, 2 / 3)),
        # each figure is the best over the golds on its own: precision of the long gold, recall of the short one
        ("2wikimultihopqa", "w x y z", ("w",), "w x", Score(0, 2 / 3, 1, 1)),
    ],
)
def test_answers_by_hand(dataset, gold, aliases, said, expected):
    got = metrics.answer(question(dataset, gold, aliases), said)
    assert dataclasses.astuple(got) == pytest.approx(dataclasses.astuple(expected))


def naive_normalise(text):
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return [word for word in re.split(r"\s+", kept) if word and word not in ("a", "an", "the")]


def naive_f1(got, want, dataset):
    """By matching tokens off one by one, straight from the rules."""
    if dataset != "musique" and got != want:
        for side in (got, want):
            if side in (["yes"], ["no"], ["noanswer"]):
                return 0.0
    if dataset == "musique" and (not got or not want):
        return float(got == want)
    left, same = list(want), 0
    for token in got:
        if token in left:
            left.remove(token)
            same += 1
    return 2 * same / (len(got) + len(want)) if same else 0.0


@given(st.sampled_from(SETS), TEXTS, st.lists(TEXTS, max_size=2), TEXTS)
def test_answers_against_a_second_derivation(dataset, gold, aliases, said):
    names = [gold] if dataset == "hotpotqa" else [gold, *aliases]
    got, score = naive_normalise(said), metrics.answer(question(dataset, gold, tuple(aliases)), said)
    assert score.em == any(got == naive_normalise(name) for name in names)
    assert score.f1 == pytest.approx(max(naive_f1(got, naive_normalise(name), dataset) for name in names))


@given(st.sampled_from(SETS), TEXTS, TEXTS)
def test_more_aliases_never_hurt_and_scores_are_rates(dataset, gold, said):
    one, two = metrics.answer(question(dataset, gold), said), metrics.answer(question(dataset, gold, ("Ada",)), said)
    for a, b in zip(dataclasses.astuple(one), dataclasses.astuple(two), strict=True):
        assert 0 <= a <= b <= 1
    assert metrics.answer(question(dataset, gold), gold).em == 1


def test_sentences_count_titles_by_their_case_in_hotpotqa_alone():
    facts = (("Ada", 0), ("Ben", 1))
    said = [("ada", 0), ("Ben", 1), ("Ben", 1)]
    assert metrics.sentences(question("hotpotqa", supporting_facts=facts), said) == Score(0, 0.5, 0.5, 0.5)
    assert metrics.sentences(question("2wikimultihopqa", supporting_facts=facts), said) == Score(1, 1, 1, 1)
    # two spellings of one title are two predictions, both right, as the official lists have it
    twice = metrics.sentences(question("2wikimultihopqa", supporting_facts=facts), [*said, ("Ada", 0)])
    assert twice == Score(1, 1, 1, 1)


@pytest.mark.parametrize("dataset", ["hotpotqa", "2wikimultihopqa"])
def test_no_support_asked_and_none_given(dataset):
    assert metrics.sentences(question(dataset), []) == Score(1, 0, 0, 0)
    assert metrics.sentences(question(dataset), [("Ada", 0)]) == ZERO


def test_paragraphs_by_the_rule_of_musique():
    assert metrics.paragraphs(question(support=(0, 2)), [2, 0, 0]) == Score(1, 1, 1, 1)
    assert metrics.paragraphs(question(support=(0, 2)), [0, 1, 3]) == Score(0, 0.4, 1 / 3, 0.5)
    assert metrics.paragraphs(question(support=()), []) == Score(1, 1, 1, 1)
    assert metrics.paragraphs(question(support=(0,)), []) == ZERO


def test_evidence_takes_aliases_and_keeps_articles():
    golds = [[("Ada", "boss", "Ben"), ("Ada", "boss", "Benny")], [("the Ben", "owns", "Cleo")]]
    assert metrics.evidence(golds, [("ADA.", "boss", "benny"), ("The  Ben", "owns", "Cleo!")]) == Score(1, 1, 1, 1)
    assert metrics.evidence(golds, [("Ada", "boss", "Ben"), ("Ben", "owns", "Cleo")]) == Score(0, 0.5, 0.5, 0.5)
    # both names of one triple count: three right of three, recall 3/2, and yet no exact match
    three = metrics.evidence(golds, [*golds[0], *golds[1]])
    assert three == Score(0, pytest.approx(1.2), 1, 1.5)
    assert metrics.evidence([], []) == Score(1, 0, 0, 0)


def test_joint_multiplies_precision_and_recall():
    got = metrics.joint(Score(1, 0, 0.5, 1), Score(1, 0, 0.5, 0.5), Score(0, 0, 1, 0.5))
    assert got == Score(0, 0.25, 0.25, 0.25)
    assert metrics.joint(Score(1, 1, 1, 1), ZERO) == ZERO


def test_what_is_missing_scores_nothing():
    q = question(supporting_facts=(("T0", 0),))
    missing = [metrics.answer(q, None), metrics.sentences(q, None), metrics.paragraphs(q, None)]
    assert [*missing, metrics.evidence([], None)] == [ZERO] * 4


def test_means_print_as_the_scripts_print_them():
    score = metrics.mean([Score(1, 1, 1, 1), ZERO, ZERO])
    assert metrics.official("2wikimultihopqa", score).em == 33.33
    assert metrics.official("musique", score).em == 0.333
    assert metrics.official("hotpotqa", score).em == pytest.approx(1 / 3, abs=1e-15)
    with pytest.raises(UserError, match="no scores"):
        metrics.mean([])


@given(st.permutations(range(7)), st.sets(st.integers(0, 6), min_size=1), st.integers(1, 9))
def test_recall_counts_the_gold_of_a_prefix(ranking, gold, k):
    seen = 0
    for place, candidate in enumerate(ranking):
        seen += place < k and candidate in gold
    assert metrics.recall_at(ranking, gold, k) == seen / len(gold)
    assert metrics.all_gold_at(ranking, gold, k) == (seen == len(gold))
    assert metrics.recall_at(ranking, gold, k) <= metrics.recall_at(ranking, gold, k + 1)


def test_tables_by_question_and_by_hops():
    questions = [question(support=(0, 2)), question(support=(1, 2)), question(support=(0, 1, 3))]
    table = metrics.retrieval(questions, [[0, 2, 1, 3]] * 3, ks=(1, 2))
    np.testing.assert_allclose(table["recall@2"], [1, 0.5, 1 / 3])
    np.testing.assert_array_equal(table["all@2"], [1, 0, 0])
    assert metrics.by_hops(questions, table["recall@2"]) == {2: (0.75, 2), 3: (pytest.approx(1 / 3), 1)}


@pytest.mark.parametrize(
    ("ranking", "gold", "k", "line"),
    [([0, 1], [], 1, "0 supporting"), ([0, 1], [0], 0, "k = 0"), ([1, 1], [1], 1, "twice")],
)
def test_rankings_that_are_none(ranking, gold, k, line):
    with pytest.raises(UserError, match=line):
        metrics.recall_at(ranking, gold, k)


def test_a_ranking_for_each_question():
    with pytest.raises(UserError, match="0 rankings of 1"):
        metrics.retrieval([question()], [], ks=(1,))
