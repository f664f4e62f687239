"""Channels and links against values worked out by hand."""

import math

import numpy as np
import pytest

from molora_jax.data.multihop.question import Question, Segment
from molora_jax.retrieval import baselines, channels
from molora_jax.retrieval.channels import LEXICAL, LEXICAL_LINKS

TEXTS = [
    ("Ada (ship)", "Built by Ben Hall in Rome."),
    ("Ben Hall", "Ben Hall was born in Oslo."),
    ("Rome", "A city. The ship is not there."),
    ("", "Nothing to see"),
]


def question(order=range(4)):
    segments = tuple(
        Segment(title=TEXTS[i][0], sentences=(TEXTS[i][1],), supporting=i < 2, supporting_sentences=()) for i in order
    )
    return Question(
        id="q", dataset="x", split="dev", question="Where was the builder of Ada born?", answer="Oslo", hops=2,
        segments=segments,
    )  # fmt: skip


def column(found, names, name):
    return found[..., names.index(name)]


def test_channels_by_hand(monkeypatch):
    monkeypatch.setattr(baselines, "bm25", lambda question: np.array([4.0, 2.0, 0.0, 2.0]))
    found = channels.lexical(question())
    assert found.shape == (4, len(LEXICAL))
    root = math.sqrt(2)
    np.testing.assert_allclose(column(found, LEXICAL, "bm25"), [root, 0, -root, 0], atol=1e-6)
    assert column(found, LEXICAL, "title_in_question").tolist() == [1, 0, 0, 0]
    assert column(found, LEXICAL, "question_title_share").tolist() == [1, 0, 0, 0]
    idf = lambda df: math.log(1 + (4 - df + 0.5) / (df + 0.5))
    known = {"was": 1, "the": 1, "ada": 1, "born": 1}  # each in one of the texts; "where", "builder", "of" in none
    whole = sum(map(idf, known.values()))
    want = [idf(1) / whole, 2 * idf(1) / whole, idf(1) / whole, 0]
    np.testing.assert_allclose(column(found, LEXICAL, "coverage"), want, rtol=1e-6)


def test_links_by_hand():
    found = channels.lexical_links(question())
    names = column(found, LEXICAL_LINKS, "title_in_anchor")
    want = np.zeros((4, 4))
    want[0, 1] = want[0, 2] = 1  # Ada's text names Ben Hall and Rome
    np.testing.assert_array_equal(names, want)
    np.testing.assert_array_equal(column(found, LEXICAL_LINKS, "anchor_title_in"), want.T)
    rest = column(found, LEXICAL_LINKS, "coverage_of_rest")
    assert rest[0, 1] == pytest.approx(2 / 3)  # of "was", "the" and "born", which Ada's segment lacks
    assert rest[1, 0] == pytest.approx(1 / 2)  # of "the" and "ada"
    cosine = column(found, LEXICAL_LINKS, "tfidf")
    np.testing.assert_allclose(cosine, cosine.T)
    assert cosine[0, 1] > cosine[0, 3] == 0
    assert not found[np.arange(4), np.arange(4)].any()


@pytest.mark.parametrize("order", [(3, 1, 0, 2), (1, 0)])
def test_another_order_moves_and_changes_nothing_else(order, monkeypatch):
    monkeypatch.setattr(baselines, "bm25", baselines.tfidf)
    if len(order) == 4:
        index = list(order)
        np.testing.assert_allclose(channels.lexical(question(order)), channels.lexical(question())[index], atol=1e-6)
        links = channels.lexical_links(question())[index][:, index]
        np.testing.assert_allclose(channels.lexical_links(question(order)), links, atol=1e-6)
    else:
        assert channels.lexical_links(question(order)).shape == (2, 2, len(LEXICAL_LINKS))


def test_dense_channels_and_links():
    segments = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    found = channels.dense(np.array([1.0, 0.0]), segments)
    cosines = np.array([1.0, 0.0, 0.6])
    np.testing.assert_allclose(found[:, 0], (cosines - cosines.mean()) / cosines.std(), rtol=1e-6)
    np.testing.assert_allclose(found[:, 1], 4 * (cosines - 1), rtol=1e-6)
    np.testing.assert_allclose(
        channels.dense_links(segments)[:, :, 0], [[0, 0, 0.6], [0, 0, 0.8], [0.6, 0.8, 0]], rtol=1e-6
    )


def test_equal_scores_stand_out_nowhere():
    assert channels.standard([2, 2, 2]).tolist() == [0, 0, 0]
    assert channels.standard([5]).tolist() == [0]
