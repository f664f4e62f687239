"""From training to an answer over a folder of texts, on a tiny model."""

import dataclasses

import numpy as np
import pytest

from molora_jax.adapters.library import Library
from molora_jax.checkpoints.model import Model
from molora_jax.config import UserError
from molora_jax.engine import beams
from molora_jax.retrieval import answer, assistant, baselines, comparison, evaluation, recipe
from molora_jax.retrieval.answer import Answer
from molora_jax.retrieval.encode import EncoderConfig
from tests import experts, fakes
from tests.retrieval.questions import Letters, normalised

CFG, PARAMS = fakes.model("llama_tied")
MODEL = Model(dataclasses.replace(CFG, max_positions=512), PARAMS, Letters())


@pytest.fixture(autouse=True)
def plain_bm25(monkeypatch):
    """TF-IDF in BM25's place, so that nothing here needs its package."""
    monkeypatch.setattr(baselines, "bm25", baselines.tfidf)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with data, encodings and the router; and the router."""
    folder = tmp_path_factory.mktemp("retrieve")
    for name in ("musique", "hotpotqa", "2wikimultihopqa"):
        for split, count in (("train", 20), ("dev", 6)):
            normalised(folder / "data" / "multihop" / f"{name}.jsonl", split, count, dataset=name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "bm25", baselines.tfidf)
        patch.setattr(recipe, "TRAINING", dataclasses.replace(recipe.TRAINING, epochs=4, passes=2, rate=1e-2))
        how = EncoderConfig(depths=(1,))
        kept, to = folder / "kept", folder / "router"
        learn = [q for own in comparison.questions(folder / "data", "train").values() for q in own[:15]]
        made = assistant.train(MODEL, how, kept, learn, to, target=0.5, seed=0)
    return folder, made


def test_what_is_written_is_what_was_trained(trained):
    folder, made = trained
    read = assistant.Assistant.load(folder / "router", MODEL, folder / "kept")
    for question in comparison.questions(folder / "data", "dev")["musique"]:
        assert read.pick(question) == made.pick(question)


def test_figures_by_set_and_hops(trained):
    folder, made = trained
    dev = comparison.questions(folder / "data", "dev")
    rows = evaluation.retrieval(made, dev)
    assert [(row["set"], row["hops"]) for row in rows] == [(name, hops) for name in dev for hops in ("all", 2)]
    assert [row["n"] for row in rows] == [6] * 6
    assert rows[0]["r4"] > 0.8  # of 5
    assert all(rows[0][key] == rows[1][key] for key in ("r2", "all4"))
    ranked = [made.rank(question).ranking for question in dev["hotpotqa"]]
    want = [len({0, 4} & set(ranking[:2])) / 2 for ranking in ranked]
    assert rows[2]["r2"] == pytest.approx(np.mean(want))
    assert rows[0]["whole"] <= 1 <= rows[0]["taken"]


def test_answers_and_their_cost(trained, monkeypatch):
    folder, made = trained
    dev = dict(musique=comparison.questions(folder / "data", "dev")["musique"])
    seen = []

    def told(model, prompts, *, width, reader):
        seen.append(prompts)
        return [Answer(question.answer, 10, 2) for question in dev["musique"]]

    monkeypatch.setattr(answer, "answers", told)
    how = dict(top=3, order="reading", beams=1)
    rows = evaluation.answers(made, dev, ["mara", "gold", "all", "bm25", "none"], **how)
    assert [row["answer_em"] for row in rows] == [1] * 5
    assert (rows[1]["support_em"], rows[1]["joint_f1"], rows[4]["support_f1"]) == (1, 1, 0)
    assert rows[2]["support_f1"] == pytest.approx(2 * 0.4 / 1.4)
    assert [row["encoder"] > 0 for row in rows] == [True, False, False, False, False]
    assert (rows[0]["prefill"], rows[0]["decode"]) == (10, 2)
    chosen = sorted(made.rank(dev["musique"][0]).ranking[:3])
    assert seen[0][0] == answer.prompt(dev["musique"][0], chosen)
    assert seen[4][0].startswith("Context:\n\n\nQuery:")
    with pytest.raises(UserError, match="got 'some', expected some of mara"):
        evaluation.answers(made, dev, ["some"], **how)


def test_an_adapted_reader():
    [text] = answer.answers(MODEL, ["abc"], width=1, max_new_tokens=5, cut=str)
    adapter = experts.adapter(CFG, PARAMS, "plain")
    [other] = answer.answers(MODEL, ["abc"], width=1, max_new_tokens=5, cut=str, reader=adapter)
    bank = Library.holding([adapter], PARAMS).bank
    how = dict(beams=1, max_new_tokens=5, stops=Letters.eos, bank=bank, expert=0)
    [[beam]] = beams.search(MODEL.cfg, PARAMS, [Letters().encode("abc")], **how)
    assert other.text == Letters().decode(beam.tokens) != text.text


def test_evidence_from_a_folder(trained, tmp_path):
    folder, _ = trained
    helper = assistant.Assistant.load(folder / "router", MODEL, folder / "kept")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "Ada_Byron.txt").write_text("Ada Byron met Ben.\n\nShe lived\nin London.\n\n\n")
    (tmp_path / "ben.md").write_text("# Ben\n\nBen was born in Oslo.")
    (tmp_path / "oslo.md").write_text("## Oslo, the city ##\nIt lies\non a fjord.\n\n#1 in Norway.\n")
    (tmp_path / "image.png").write_bytes(b"\xff")
    question = assistant.about(str(tmp_path), "Who did Ada Byron meet?", 2)
    everything = assistant.about(str(tmp_path), "Who did Ada Byron meet?", 9)
    assert [(s.title, s.text) for s in everything.segments] == [
        ("Ben", "Ben was born in Oslo."),
        ("Ada Byron", "Ada Byron met Ben."), ("Ada Byron", "She lived in London."),
        ("Oslo, the city", "It lies on a fjord."), ("Oslo, the city", "#1 in Norway."),
    ]  # fmt: skip
    assert len(question.segments) == 2
    picked = helper.pick(everything, top=2)
    ranked = helper.rank(everything)
    assert [index for index, _ in picked] == list(ranked.ranking[:2])
    assert 1 <= len(helper.pick(everything)) <= 5
    (tmp_path / "long.txt").write_bytes(b"\xef\xbb\xbf# Long\n" + b"a b. " * 40 + b"c " * 130)  # a mark in front
    parts = [s.text for s in assistant.about(str(tmp_path), "a b", 99).segments if s.title == "Long"]
    assert [len(part.split()) for part in parts] == [80, 100, 30]
    assert " ".join(parts).split() == ["a", "b."] * 40 + ["c"] * 130
    text = helper.answer(everything, [1, 0], order="reading", beams=2)
    assert isinstance(text, str)


def test_a_router_of_another_base_is_refused(trained):
    folder, _ = trained
    params = MODEL.params | {"embed": {"weight": MODEL.params["embed"]["weight"] * 1.5}}
    with pytest.raises(UserError, match="got a router for another base"):
        assistant.Assistant.load(folder / "router", dataclasses.replace(MODEL, params=params), folder / "kept")


def test_what_cannot_be_asked(trained, tmp_path):
    with pytest.raises(UserError, match="expected a folder"):
        assistant.about(None, "?", 3)
    with pytest.raises(UserError, match="no text"):
        assistant.about(str(tmp_path), "?", 3)
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="UTF-8"):
        assistant.about(str(tmp_path), "?", 3)
    with pytest.raises(UserError, match="MOLORA_DATA_DIR"):
        comparison.questions(None, "train")
    with pytest.raises(UserError, match=r"target: got 1.0"):
        assistant.train(MODEL, EncoderConfig(), tmp_path, [], tmp_path, target=1.0, seed=0)
    with pytest.raises(UserError, match=r"router: got 'File exists'"):
        assistant.train(MODEL, EncoderConfig(), tmp_path, [], tmp_path / "bad.txt", target=0.5, seed=0)
    with pytest.raises(UserError, match=r"got no mara.json"):
        assistant.Assistant.load(tmp_path, MODEL, tmp_path)
