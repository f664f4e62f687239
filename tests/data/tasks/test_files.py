"""Every benchmark reads its official format; malformed rows are skipped and reported, or end the program."""

import json

import pytest

from molora_jax.config import UserError
from molora_jax.data.rows import Report
from molora_jax.data.tasks.registry import TASKS, judge, task

ARC = {
    "id": "Q_7",
    "question": {"stem": "What falls?", "choices": [{"label": "A", "text": "rain"}, {"label": "B", "text": "a hill"}]},
    "answerKey": "A",
}
MEDQA = {"question": "Which?", "options": {"A": "this", "B": "that"}, "answer_idx": "B", "answer": "that"}
BOOLQ = {"question": "is ice cold", "title": "Ice", "passage": "Ice is frozen.", "answer": True}
SVAMP = {
    "ID": "chal-1",
    "Body": "Ann had 3",
    "Question": "How many?",
    "Equation": "( 3.0 )",
    "Answer": 3.0,
    "Type": "x",
}
GSM8K = {"question": "Half of 2,000?", "answer": "It is 2000/2=<<2000/2=1000>>1000.\n#### 1,000"}

ROWS = {
    "gsm8k": (GSM8K, "Half of 2,000?", "1000"),
    "svamp": (SVAMP, "Ann had 3. How many?", "3"),
    "arc": (ARC, "What falls?\nA. rain\nB. a hill", "A"),
    "arc_easy": (ARC, "What falls?\nA. rain\nB. a hill", "A"),
    "boolq": (BOOLQ, "Ice is frozen.\n\nIs ice cold?", "yes"),
    "cola": ('gj04\t0\t*\tHim "likes it.', 'Him "likes it.', "unacceptable"),
    "medqa": (MEDQA, "Which?\nA. this\nB. that", "B"),
}
BAD = {
    "gsm8k": [GSM8K | {"answer": "It is 7"}, GSM8K | {"answer": "#### seven"}, {"answer": "#### 7"}],
    "svamp": [SVAMP | {"Answer": None}, SVAMP | {"Answer": True}, SVAMP | {"Body": 3}, {}],
    "arc": [ARC | {"answerKey": "C"}, ARC | {"question": "x"}, ARC | {"question": {"stem": "x", "choices": []}}],
    "arc_easy": [ARC | {"question": {"stem": "x", "choices": [{"label": "A"}]}}],
    "boolq": [BOOLQ | {"answer": "true"}, BOOLQ | {"passage": None}],
    "cola": ["gj04\t1\tno mark", "gj04\t2\t\tIt.", "gj04\t1\t\t  "],
    "medqa": [MEDQA | {"answer": "this"}, MEDQA | {"answer_idx": "E"}, MEDQA | {"options": {"A": 1, "B": "that"}}, 7],
}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("".join(f"{row if path.suffix == '.tsv' else json.dumps(row)}\n" for row in rows))


def folder(root, name, rows):
    for patterns in TASKS[name].files.values():
        for pattern in patterns:
            write(root / pattern.replace("*", "_part"), rows)
    return root


@pytest.mark.parametrize("name", TASKS)
def test_rows_become_examples(tmp_path, name):
    row, asked, answer = ROWS[name]
    for split, patterns in TASKS[name].files.items():
        examples = task(name).load(split, data_dir=folder(tmp_path, name, [row, row]))
        assert len(examples) == 2 * len(patterns)
        for example in examples:
            assert example.prompt.count(asked) == 1
            assert "<think>" in example.prompt
            assert (example.answer, example.task, example.split) == (answer, name, split)
            assert judge(example).verify([answer], [example.completion]) == [True]
            assert judge(example).valid(example.completion)
            assert not judge(example).verify([answer], [example.completion.replace(answer, "7")])[0]


def test_ids_are_unique_and_name_the_row(tmp_path):
    examples = task("cola").load("validation", data_dir=folder(tmp_path, "cola", [ROWS["cola"][0]] * 3))
    assert len({example.id for example in examples}) == 6
    assert examples[1].id == "cola/in_domain_dev/2"


def test_calculator_notes_are_not_in_the_reasoning(tmp_path):
    example = task("gsm8k").load("train", data_dir=folder(tmp_path, "gsm8k", [GSM8K]))[0]
    assert example.completion == '<think>\nIt is 2000/2=1000.\n</think>\n\n{"answer": "1000"}'


@pytest.mark.parametrize("name", TASKS)
def test_malformed_rows_are_skipped_counted_and_named(tmp_path, name, caplog):
    split = next(iter(TASKS[name].files))
    good, bad = ROWS[name][0], BAD[name]
    data, report = folder(tmp_path, name, [good, *bad, good]), Report()
    examples = task(name).load(split, data_dir=data, report=report)
    assert len(examples) == report.used == 2
    first = 1 if name != "svamp" else len(json.dumps([good], indent=1).splitlines())
    assert len(report.skipped) == len(bad)
    assert report.skipped[0].line == first + 1 - (name == "svamp")
    assert str(report.skipped[0]).startswith(f"{data / TASKS[name].files[split][0].replace('*', '_part')}:")
    assert f"2 rows used, 0 left out, {len(bad)} skipped" in str(report)
    with pytest.raises(UserError, match=r":\d+: .*; mend the row") as error:
        task(name).load(split, data_dir=data, strict=True)
    assert "\n" not in str(error.value)


def test_lines_that_are_no_json(tmp_path):
    path, report = tmp_path / "rows.jsonl", Report()
    path.write_text(f"{json.dumps(GSM8K)}\n\n{{broken\r\n{json.dumps(GSM8K, ensure_ascii=False)}\u2028\n[]\n")
    assert len(task("gsm8k").load("train", files=[path], report=report)) == 1
    assert [skip.line for skip in report.skipped] == [3, 4, 5]
    with pytest.raises(UserError, match="rows.jsonl:3: not JSON"):
        task("gsm8k").load("train", files=[path], strict=True)


@pytest.mark.parametrize("text", ["{}", "[{}", "[{} {}]", "[{},", "", '[{"ID": ]'])
def test_an_array_that_cannot_be_read_is_one_line(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=r"x.json") as error:
        task("svamp").load("test", files=[tmp_path / "x.json"])
    assert "\n" not in str(error.value)


def test_empty_array(tmp_path):
    (tmp_path / "x.json").write_text(" [ ]\n")
    assert task("svamp").load("test", files=[tmp_path / "x.json"]) == []


def test_passages_of_the_development_file_are_left_out_of_training(tmp_path):
    rows, report = [BOOLQ | {"passage_in_dev": True}, BOOLQ | {"passage_in_dev": False}], Report()
    data = folder(tmp_path, "boolq", rows)
    assert len(task("boolq").load("train", data_dir=data, report=report)) == report.used == report.left_out == 1
    assert len(task("boolq").load("validation", data_dir=data)) == 2


def test_numbered_choices(tmp_path):
    choices = [{"label": "1", "text": "rain"}, {"label": "2", "text": "a hill"}]
    row = {"id": "Q", "question": {"stem": "What falls?", "choices": choices}, "answerKey": "2"}
    example = task("arc").load("test", data_dir=folder(tmp_path, "arc", [row]))[0]
    assert judge(example).verify([example.answer], ["The answer is 2."]) == [True]


def test_the_environment_names_the_data_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("MOLORA_DATA_DIR", raising=False)
    with pytest.raises(UserError, match="MOLORA_DATA_DIR"):
        task("svamp").load("test")
    monkeypatch.setenv("MOLORA_DATA_DIR", str(folder(tmp_path, "svamp", [SVAMP])))
    assert len(task("svamp").load("test")) == 1


def test_wrong_names_end_in_one_line(tmp_path):
    with pytest.raises(UserError, match="'mmlu', expected one of gsm8k"):
        task("mmlu")
    with pytest.raises(UserError, match="'train', expected one of test"):
        task("svamp").load("train", data_dir=tmp_path)
    with pytest.raises(UserError, match=r"no maths/SVAMP.json in .*--data_dir"):
        task("svamp").load("test", data_dir=tmp_path)
    with pytest.raises(UserError, match="no folder"):
        task("svamp").load("test", data_dir=tmp_path / "absent")
    with pytest.raises(UserError, match="ends in .jsonl"):
        task("svamp").load("test", files=[tmp_path / "x.parquet"])
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not UTF-8"):
        task("gsm8k").load("test", files=[tmp_path / "x.jsonl"])
