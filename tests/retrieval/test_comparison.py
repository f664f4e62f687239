"""Slates from questions, their cache, and the rows of a comparison."""

import dataclasses
import json

import numpy as np
import pytest

from molora_jax.config import UserError
from molora_jax.retrieval import baselines, channels, comparison, mara, once, recipe, training
from molora_jax.retrieval.attention import AttentionConfig, AttentionRanker
from molora_jax.retrieval.comparison import Inputs
from molora_jax.retrieval.encode import Encoder, EncoderConfig
from molora_jax.retrieval.mara import MaraConfig
from molora_jax.retrieval.report import Report, table
from molora_jax.retrieval.slates import Beside, Slate, jobs
from tests import fakes
from tests.retrieval.questions import Letters, normalised, question


class Twins:
    """A sentence encoder that knows a text by its letters."""

    digest, layers = "twins", 2

    def __init__(self):
        self.calls = 0

    def embed(self, texts):
        self.calls += 1
        found = np.array([[text.count(letter) for letter in "abcdeit"] for text in texts], float) + 1e-3
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    def count(self, texts):
        return sum(map(len, texts))


@pytest.fixture(autouse=True)
def plain_bm25(monkeypatch):
    """TF-IDF in BM25's place, so that nothing here needs its package."""
    monkeypatch.setattr(baselines, "bm25", baselines.tfidf)


@pytest.fixture
def data(tmp_path):
    for name in ("musique", "hotpotqa", "2wikimultihopqa"):
        for split, count in (("train", 16), ("dev", 3)):
            normalised(tmp_path / "multihop" / f"{name}.jsonl", split, count, dataset=name)
    return tmp_path


def test_channels_are_kept_by_what_they_are_made_of(tmp_path):
    own, twins = question(), Twins()
    first = Beside(dense=twins, cache=tmp_path).of([own, question(count=2, support=(0,))])
    again = Beside(dense=twins, cache=tmp_path).of([own])
    assert twins.calls == 1
    np.testing.assert_array_equal(again[0][0], first[0][0])
    np.testing.assert_array_equal(again[0][1], first[0][1])
    assert first[0][0].shape == (4, len(channels.LEXICAL) + len(channels.DENSE))
    other = dataclasses.replace(own, question="Which?")
    Beside(dense=twins, cache=tmp_path).of([other])
    assert twins.calls == 2
    assert Beside(cache=tmp_path).of([own])[0][1].shape == (4, 4, len(channels.LEXICAL_LINKS))


def test_rankings_made_elsewhere(data, tmp_path):
    dev = comparison.questions(data, "dev")
    first, second, third = dev["wiki2"]
    count = len(first.segments)
    file = tmp_path / "theirs.json"
    theirs = {first.id: [2, 0], second.id: [], third.id: list(range(count))[::-1]}
    file.write_text(json.dumps({"wiki2": theirs, "another": {}}))
    found = comparison.given(file, dev)
    assert found == {"wiki2": [(2, 0), (), tuple(range(count))[::-1]]}
    rest = [i for i in range(count) if i not in (2, 0)]
    whole = [(2, 0, *rest), tuple(range(count)), tuple(range(count))[::-1]]
    assert [comparison.completed(own, count) for own in found["wiki2"]] == whole
    rows = []
    report = Report(lambda **row: rows.append(row), dev)
    report.untrained(Beside(), 1)
    report.given("beam", file)
    picked, *own = [row for row in rows if row["system"] == "beam"]
    assert (picked["named"], picked["support_em"]) == (pytest.approx((2 + count) / 3), 0)
    assert picked["support_recall"] == pytest.approx((1 / 2 + 0 + 1) / 3)
    assert [row["set"] for row in own] == ["wiki2"]
    support = [set(q.supporting) for q in dev["wiki2"]]
    hits = [len(s & set(r[:2])) / len(s) for s, r in zip(support, whole, strict=True)]
    assert own[0]["r2"] == pytest.approx(np.mean(hits))
    assert "| beam | theirs | wiki2 | 3 |" in report.table()
    assert own[0]["cost"] is None
    for bad in ({first.id: [0]}, theirs | {first.id: [0, 0]}, theirs | {first.id: [count]}):
        file.write_text(json.dumps({"wiki2": bad}))
        with pytest.raises(UserError, match="expected JSON with a ranking for each question of a set"):
            comparison.given(file, dev)
    file.write_text("{}")
    with pytest.raises(UserError, match="got none of the sets musique, hotpotqa, wiki2"):
        comparison.given(file, dev)


def test_a_comparison_from_files_to_rows(data):
    train, dev = (comparison.questions(data, split) for split in ("train", "dev"))
    assert {name: len(own) for name, own in train.items()} == dict(musique=16, hotpotqa=16, wiki2=16)
    inputs = Inputs(Encoder(*fakes.model("llama_tied"), Letters(), EncoderConfig(depths=(1, 2))), Beside())
    rows = []
    report = Report(lambda **row: rows.append(row), dev, {"more": dev["musique"][:2]})
    report.untrained(Beside(dense=Twins()), 2)
    report.measure(
        "first",
        {of: [[range(5)] * len(q)] for of, q in report.questions.items()},
        dict.fromkeys(report.questions, 7),
        trained_on="-",
    )
    ranker = AttentionRanker(*fakes.model("llama_tied"), Letters(), AttentionConfig(layers=1, heads=2))
    report.frozen(inputs.encoder, ranker, {"musique": train["musique"][:2]})
    shown = {(row["system"], row["set"]): row for row in rows}
    assert {name for name, _ in shown} == {"bm25", "tfidf", "dense", "random", "oracle", "first", "last", "attention"}
    letters = [sum(len(s.title) + len(s.text) + 3 for s in q.segments) + len(q.question) for q in dev["musique"]]
    assert shown["attention", "musique"]["cost"] == np.mean(letters) + 1 + len("Question: ")
    assert shown["last", "musique"]["cost"] > 2 * np.mean(letters)
    assert {of for _, of in shown} == {"musique", "hotpotqa", "wiki2", "pooled", "more"}
    assert (shown["first", "musique"]["r2"], shown["first", "musique"]["all4"], shown["first", "musique"]["r5"]) == (
        0.5,
        0,
        1,
    )
    assert shown["oracle", "pooled"]["r2"] == 1
    assert shown["oracle", "pooled"]["n"] == 9
    assert shown["dense", "musique"]["cost"] > 0 == shown["bm25", "musique"]["cost"]
    assert report.summary["wiki2_first_r2"] == 0.5
    assert shown["oracle", "musique"]["r2_vs_bm25"].startswith("+")
    assert report.table().count("\n") == 2 + len(rows)
    slates = inputs.slates(dev["musique"])
    assert slates[0].encodings.shape == (5, inputs.width)
    assert slates[0].channels.shape[1] == len(channels.LEXICAL)
    assert inputs.slates(dev["musique"], bare=True)[0].links.shape == (5, 5, 0)
    assert not comparison.blind(slates)[0].encodings.any()


def test_what_a_router_reads_of_an_encoding():
    how = EncoderConfig(depths=(1, 2), again=True, tokens=True)
    encoder = Encoder(*fakes.model("llama_tied"), Letters(), how)
    own = question()
    [encoding] = encoder.encode(jobs([own]))
    width, read = encoder.width, lambda *args, **how: Inputs(encoder, Beside(), *args, **how)
    for place, pooling in enumerate(("mean", "last", "again_mean", "again_last")):
        [both], [deep] = (made.slates([own]) for made in (read(pooling), read(pooling, depth=2)))
        np.testing.assert_array_equal(both.encodings[:, width:], encoding.pooled[:, 1, place])
        np.testing.assert_array_equal(deep.encodings, encoding.pooled[:, 1, place])
    assert (read("last").width, read("last", depth=1).width, read("attention").width) == (2 * width, width, width)
    [tokens] = read("attention").slates([own])
    assert [len(each) for each in tokens.encodings] == encoding.lengths.tolist()
    np.testing.assert_array_equal(np.concatenate(tokens.encodings), encoding.tokens)
    np.testing.assert_allclose(tokens.encodings[2].mean(0), encoding.pooled[2, 1, 0], rtol=1e-5, atol=1e-6)
    assert not any(each.any() for each in comparison.blind([tokens])[0].encodings)
    router = recipe.router(read("attention"), bare=True)
    [found] = training.chains(router, mara.init(router), comparison.plain([tokens]), passes=2)
    assert sorted(found.ranking) == [0, 1, 2, 3]
    with pytest.raises(UserError, match="pooling: got 'max'"):
        read("max")
    with pytest.raises(UserError, match="depth: got 3"):
        read(depth=3)


def test_the_global_head_bounds_no_ranking():
    cfg = MaraConfig(encoding=8, width=8, states=4, layers=1, slots=3, pooling="mean")
    long = [
        Slate("a", np.array([1, 0, 0, 0, 0]), np.eye(5, 8, dtype=np.float32), np.zeros((5, 0)), np.zeros((5, 5, 0)))
    ]
    [found] = training.chains(cfg, mara.init(cfg), long, passes=1)
    assert sorted(found.ranking) == [0, 1, 2, 3, 4]


def test_both_chains_are_compared_and_counted(data, monkeypatch):
    monkeypatch.setattr(recipe, "TRAINING", dataclasses.replace(recipe.TRAINING, epochs=1, passes=2, rows=4))
    inputs = Inputs(Encoder(*fakes.model("llama_tied"), Letters(), EncoderConfig(depths=(1,))), Beside())
    cfg = dataclasses.replace(recipe.router(inputs, bare=True, mixer="mlp"), layers=0)
    learn, test = ({"musique": comparison.questions(data, split)["musique"]} for split in ("train", "dev"))
    rows = []
    found = once.compare(lambda **row: rows.append(row), inputs, cfg, recipe.TRAINING, learn, test, seeds=1)
    assert [row["set"] for row in rows] == ["musique", "pooled"]
    assert found["encode_once_cost_ratio"] > 2  # two passes, the second behind an anchor, and the prefix in every row
    assert found["encode_once_recall_gap"] == pytest.approx(100 * (rows[0]["once"] - rows[0]["published"]))


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(UserError, match="musique"):
        comparison.questions(tmp_path, "dev")
    with pytest.raises(UserError, match="got 0 files"):
        comparison.babi(tmp_path, "train", 3)


def test_a_table():
    assert (
        table([dict(a=0.25, b="x"), dict(a=1234.5)], ["a", "b"])
        == "| a | b |\n| --- | --- |\n| 0.250 | x |\n| 1,234 |  |\n"
    )
