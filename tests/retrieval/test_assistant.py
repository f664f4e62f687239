"""From training to an answer over a folder of texts, on a tiny model."""

import dataclasses

import pytest

from molora_jax.checkpoints.model import Model
from molora_jax.config import UserError
from molora_jax.retrieval import assistant, baselines, recipe
from molora_jax.retrieval.encode import EncoderConfig
from tests import fakes
from tests.retrieval.questions import Letters, normalised

CFG, PARAMS = fakes.model("llama_tied")
MODEL = Model(dataclasses.replace(CFG, max_positions=512), PARAMS, Letters())


@pytest.fixture(autouse=True)
def plain_bm25(monkeypatch):
    """TF-IDF in BM25's place, so that nothing here needs its package."""
    monkeypatch.setattr(baselines, "bm25", baselines.tfidf)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A router, and the table of what it found."""
    folder = tmp_path_factory.mktemp("retrieve")
    for name in ("musique", "hotpotqa", "2wikimultihopqa"):
        for split, count in (("train", 20), ("dev", 6)):
            normalised(folder / "data" / "multihop" / f"{name}.jsonl", split, count, dataset=name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "bm25", baselines.tfidf)
        patch.setattr(recipe, "TRAINING", dataclasses.replace(recipe.TRAINING, epochs=4, passes=2, rate=1e-2))
        how = EncoderConfig(depths=(1,))
        kept, to = folder / "kept", folder / "router"
        table = assistant.train(MODEL, how, kept, str(folder / "data"), to, most=15, target=0.5, seed=0)
    return folder, table


def test_training_tells_what_it_found(trained):
    _, table = trained
    lines = table.splitlines()
    assert lines[0].startswith("| set | n | r2 | all2 | r4")
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| musique", "| hotpotqa", "| wiki2"]
    assert float(lines[2].split(" | ")[4]) > 0.8  # recall@4 of 5


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
        assistant.train(MODEL, EncoderConfig(), tmp_path, None, tmp_path, target=0.5, seed=0)
    with pytest.raises(UserError, match=r"got no mara.json"):
        assistant.Assistant.load(tmp_path, MODEL, tmp_path)
