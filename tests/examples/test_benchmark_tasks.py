"""Published benchmarks converted to tasks, from small files in their schemas."""

import json

import pytest

from examples import benchmark_tasks
from jaxrl.data.tasks import read_tasks
from tests.published import CASES, DAPO, MUSIQUE, lines, parquet


def convert_file(tmp_path, name, source, *more):
    out = tmp_path / "out" / "tasks.jsonl"
    benchmark_tasks.main([f"--name={name}", f"--in={source}", f"--out={out}", *more])
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()], out


@pytest.mark.parametrize(
    ("name", "write", "file", "found", "expected"),
    [(name, *case) for name, cases in CASES.items() for case in cases],
)
def test_published_files_become_tasks(tmp_path, name, write, file, found, expected):
    [task], out = convert_file(tmp_path, name, write(tmp_path / file, found))
    assert task["data_source"] == name
    assert {key: task.get(key) for key in expected} == expected
    assert "context" not in json.dumps(task)
    [read] = read_tasks(out, "tasks.train")
    assert read.answers == tuple(task["answers"])


def test_rows_that_are_no_tasks_are_counted(tmp_path, capsys):
    rows = [MUSIQUE, {**MUSIQUE, "id": "x", "answerable": False}]
    convert_file(tmp_path, "musique", lines(tmp_path / "a.jsonl", *rows))
    assert capsys.readouterr().out.endswith(
        "tasks.jsonl: 1 tasks\n  skipped: 1 unanswerable from its paragraphs\n"
    )
    rows = [{"prompt": "p", "answer": "1\n2"}, {"prompt": "p", "answer": 7}]
    [task], _ = convert_file(tmp_path, "enigmata", lines(tmp_path / "b.jsonl", *rows))
    assert task["answers"] == ["7"]


def test_duplicate_questions_become_one_task_with_all_answers(tmp_path, capsys):
    rows = [{**DAPO, "extra_info": {"index": f"{i % 2}"}} for i in range(6)]
    rows[3] = {**rows[3], "prompt": [{"role": "user", "content": "Another?"}]}
    tasks, _ = convert_file(tmp_path, "dapo", parquet(tmp_path / "a.parquet", *rows))
    assert [(task["id"], task["answers"]) for task in tasks] == [
        ("dapo_0", ["42"]),
        ("dapo_1", ["42"]),
    ]
    assert "skipped: 4 copies of questions, with the same answers" in capsys.readouterr().out
    rows = [{"question": q, "answer": a} for q, a in [("Who ?", ["A"]), ("who", ["B", "A"])]]
    [task], _ = convert_file(tmp_path, "nq", lines(tmp_path / "b.jsonl", *rows))
    assert task["answers"] == ["A", "B"]


def test_ids_stay_unique_and_tasks_can_be_named_and_limited(tmp_path):
    rows = [{"problem": f"{i}?", "answer": "1", "id": 0} for i in range(3)]
    source = lines(tmp_path / "a.jsonl", *rows)
    tasks, _ = convert_file(tmp_path, "aime", source, "--data_source=aime25", "--limit=2")
    assert [task["id"] for task in tasks] == ["aime25_0", "aime25_0+"]
    assert {task["data_source"] for task in tasks} == {"aime25"}


def test_a_malformed_row_ends_the_program_with_its_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        convert_file(tmp_path, "nq", lines(tmp_path / "a.jsonl", {"query": "q"}))
    assert "a.jsonl:1 is not a row of nq: KeyError('question')" in capsys.readouterr().err
