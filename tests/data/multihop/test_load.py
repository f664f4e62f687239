"""Official files and the normalised form give the same questions; malformed rows are skipped and named."""

import json

import pytest

from molora_jax.config import UserError
from molora_jax.data.multihop.load import FORMATS, load
from molora_jax.data.rows import Report

CONTEXT = [["Ada", ["Ada has a boss.", " It is Ben."]], ["Ben", ["Ben owns Cleo."]], ["Dan", []]]
WIKI = {
    "_id": "w1",
    "question": "Whom does Ada's boss own?",
    "answer": "Cleo",
    "answer_id": "Q7",
    "type": "bridge",
    "level": "easy",
    "context": CONTEXT,
    "supporting_facts": [["Ada", 1], ["Ben", 0], ["Ben", 5]],
    "evidences": [["Ada", "boss", "Ben"], ["Ben", "owns", "Cleo"]],
}
MUSIQUE = {
    "id": "2hop__1_2",
    "question": WIKI["question"],
    "answer": "Cleo",
    "answer_aliases": ["the cat"],
    "answerable": True,
    "paragraphs": [
        {"idx": i, "title": title, "paragraph_text": " ".join(said), "is_supporting": i < 2}
        for i, (title, said) in enumerate(CONTEXT)
    ],
    "question_decomposition": [],
}
NORMALISED = {
    "id": "w1",
    "dataset": "2wikimultihopqa",
    "split": "train",
    "source": "x",
    "question": WIKI["question"],
    "answer": "Cleo",
    "answer_aliases": ["Tom", "Toms"],
    "type": "bridge",
    "level": None,
    "paragraphs": [
        {"idx": i, "title": title, "sentences": said, "is_supporting": i < 2} for i, (title, said) in enumerate(CONTEXT)
    ],
    "supporting_facts": WIKI["supporting_facts"],
    "evidences": WIKI["evidences"],
}
BABI = """1 Mary moved to the bathroom.
2 Mary got the football there.
3 John went to the kitchen.
4 Where is the football? \tbathroom\t2 1
5 Mary went back to the garden.
6 Where is the football? \tgarden\t2 5
1 Sandra journeyed to the office.
2 Where is Sandra?\toffice\t1
"""
PARAGRAPH = NORMALISED["paragraphs"][0]


def write(path, rows):
    if isinstance(rows, str):
        path.write_text(rows)
    else:
        lines = path.suffix == ".jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows) if lines else json.dumps(rows))
    return path


def file_of(form, tmp_path, rows):
    return write(tmp_path / ("x.json" if form in ("hotpotqa", "2wikimultihopqa") else "x.jsonl"), rows)


def test_official_and_normalised_forms_agree(tmp_path):
    aliases = tmp_path / "id_aliases.json"
    aliases.write_text(json.dumps({"Q_id": "Q7", "aliases": ["Tom"], "demonyms": ["Toms"]}) + "\n")
    official = load("2wikimultihopqa", write(tmp_path / "dev.json", [WIKI]), split="train", aliases=aliases)
    assert official == load("normalised", write(tmp_path / "n.jsonl", [NORMALISED]))


def test_support_by_title_and_sentence(tmp_path):
    (question,) = load("hotpotqa", file_of("hotpotqa", tmp_path, [WIKI]), split="dev")
    assert (question.dataset, question.split, question.type, question.hops) == ("hotpotqa", "dev", "bridge", 2)
    assert question.supporting == (0, 1)
    assert [s.supporting_sentences for s in question.segments] == [(1,), (0,), ()]
    assert question.supporting_facts == (("Ada", 1), ("Ben", 0), ("Ben", 5))
    assert question.segments[0].text == "Ada has a boss. It is Ben."
    assert question.segments[2].text == ""
    assert question.aliases == ()


def test_musique(tmp_path):
    rows = [MUSIQUE, MUSIQUE | {"id": "3hop2__4_5_6"}]
    first, second = load("musique", file_of("musique", tmp_path, rows), split="train")
    assert (first.type, first.hops, second.type, second.hops) == ("2hop", 2, "3hop2", 3)
    assert first.aliases == ("the cat",)
    assert first.supporting == (0, 1)
    assert first.segments[0].sentences == ("Ada has a boss.  It is Ben.",)


def test_normalised_splits(tmp_path):
    rows, report = [NORMALISED, NORMALISED | {"split": "dev", "cot": "Ada's boss is Ben."}], Report()
    path = file_of("normalised", tmp_path, rows)
    assert [q.split for q in load("normalised", path)] == ["train", "dev"]
    (question,) = load("normalised", path, split="dev", report=report)
    assert (report.used, report.left_out, question.reasoning) == (1, 1, "Ada's boss is Ben.")
    kinds = [NORMALISED | {"dataset": "musique", "type": "4hop1"}, NORMALISED | {"type": None}]
    assert [q.hops for q in load("normalised", file_of("normalised", tmp_path, kinds))] == [4, 2]


def test_babi(tmp_path):
    first, second, third = load("babi", write(tmp_path / "qa2_two_train.txt", BABI), split="train")
    assert (first.question, first.answer, first.type, first.hops) == ("Where is the football?", "bathroom", "qa2", 2)
    assert [s.text for s in first.segments] == [line.split(" ", 1)[1] for line in BABI.splitlines()[:3]]
    assert (first.supporting, second.supporting, third.supporting) == ((0, 1), (1, 3), (0,))
    assert [len(q.segments) for q in (first, second, third)] == [3, 4, 1]
    assert len({q.id for q in (first, second, third)}) == 3


BAD = {
    "hotpotqa": [
        WIKI | {"supporting_facts": []},
        WIKI | {"supporting_facts": [["Eve", 0]]},
        WIKI | {"supporting_facts": [["Ada", "0"]]},
        WIKI | {"context": [["Ada", "text"]]},
        WIKI | {"context": ["Ada"]},
        {key: WIKI[key] for key in WIKI if key != "answer"},
        "text",
    ],
    "2wikimultihopqa": [WIKI | {"evidences": [["Ada", "boss"]]}],
    "musique": [
        MUSIQUE | {"answerable": False},
        MUSIQUE | {"id": "x"},
        MUSIQUE | {"answer_aliases": [1]},
        MUSIQUE | {"paragraphs": [PARAGRAPH]},
        MUSIQUE | {"paragraphs": []},
        7,
    ],
    "normalised": [
        NORMALISED | {"paragraphs": [PARAGRAPH | {"is_supporting": False}]},
        NORMALISED | {"paragraphs": [PARAGRAPH | {"sentences": "text"}]},
        NORMALISED | {"split": None},
        NORMALISED | {"type": 3},
        [],
    ],
}
GOOD = {"hotpotqa": WIKI, "2wikimultihopqa": WIKI, "musique": MUSIQUE, "normalised": NORMALISED}


@pytest.mark.parametrize("form", BAD)
def test_malformed_rows_are_skipped_and_named(tmp_path, form):
    path, report = file_of(form, tmp_path, [GOOD[form], *BAD[form], GOOD[form]]), Report()
    assert len(load(form, path, split="train", report=report)) == report.used == 2
    assert len(report.skipped) == len(BAD[form])
    for row in BAD[form]:
        with pytest.raises(UserError, match=r"x.jsonl?:\d+: .*; mend the row") as error:
            load(form, file_of(form, tmp_path, [row]), split="train", strict=True)
        assert "\n" not in str(error.value)


def test_malformed_lines_of_a_story(tmp_path):
    lines = BABI.splitlines()
    lines[1] = "Mary got the football there."
    lines += ["3 Where?\toffice", "4 Where?\toffice\tone"]
    report = Report()
    questions = load("babi", write(tmp_path / "qa1.txt", "\n".join(lines)), split="test", report=report)
    assert [q.answer for q in questions] == ["office"]
    assert [skip.line for skip in report.skipped] == [2, 4, 6, 9, 10]
    assert "supporting line 2 is not in the story" in str(report.skipped[1])


def test_wrong_names_end_in_one_line(tmp_path):
    with pytest.raises(UserError, match="'squad', expected one of hotpotqa"):
        load("squad", tmp_path / "x.json", split="dev")
    for form in FORMATS:
        with pytest.raises(UserError, match="cannot read|does not tell its split"):
            load(form, tmp_path / "absent.json")
