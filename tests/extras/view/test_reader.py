"""Workdirs that are complete, damaged, incomplete or still growing."""

import json
import os
import shutil

import pytest

from jaxrl.extras.view.reader import RunReader
from jaxrl.extras.view.trajectories import COLUMNS, TrajectoryIndex, parse_leading_fields
from tests.extras.view.workdirs import (
    HOSTILE,
    make_run,
    step_file,
    trajectory,
    view,
    write_lines,
    write_trajectories,
)

FOREVER = float("inf")


def read(workdir):
    reader = RunReader(workdir, "run")
    reader.refresh()
    return reader


def rows_of(index):
    """Rows by column names, sorted by step and line."""
    named = [dict(zip(COLUMNS, row, strict=True)) for row in index.rows]
    return sorted(named, key=lambda row: (row["step"], row["line"]))


class TestRecords:
    def test_lines_are_read_once_they_are_whole_and_damaged_ones_counted(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        bad = ["{", "[]", "3", '{"stage": "train"}', '{"step": true}', '{"step": 1, "stage": 2}']
        write_lines(path, [{"step": 1}, *bad, "", "  ", '{"step": 1e400}', {"step": 2}])
        reader = read(tmp_path)
        assert reader.records == [{"stage": "train", "step": step} for step in (1, 2)]
        assert f"{len(bad) + 1} lines of metrics.jsonl are damaged" in reader.problems
        version = reader.version
        for text, steps in (('{"step"', [1, 2]), (": 3}\n", [1, 2, 3])):
            with path.open("a") as file:
                file.write(text)
            reader.refresh()
            assert [record["step"] for record in reader.records] == steps
        assert reader.version > version
        # A restart puts another file in its place.
        write_lines(tmp_path / "new", [{"step": step} for step in range(5, 9)])
        os.replace(tmp_path / "new", path)
        reader.refresh()
        assert [record["step"] for record in reader.records] == [5, 6, 7, 8]
        path.unlink()
        reader.refresh()
        assert reader.records == []


class TestRunReader:
    @pytest.mark.parametrize("content", ["", "{", "3", '[3, {"a": 1}]', "\x00"])
    def test_files_with_other_content(self, tmp_path, content):
        run = make_run(tmp_path / "run")
        for name in ("metrics.jsonl", "config.json", "environment.json", "config_history.jsonl"):
            (run / name).write_text(content)
        for path in (run / "eval").iterdir():
            path.write_text(content)
        viewer = view(run)
        [summary] = viewer.respond("overview")["runs"]
        assert (summary["step"], summary["config"], summary["scores"]) == (None, [], [])
        assert viewer.respond("curves/0") == {}


class TestTrajectoryIndex:
    def test_rows_are_the_records(self, tmp_path):
        records = [
            trajectory("a", reward=0.0, advantage=-0.25),
            "{",
            trajectory("b", outcome="environment_error", reward=None, advantage=None),
            '{"task_id": 3, "outcome": "answered"}',
            "",
            trajectory("a", final_answer="é" * 300, query=None, turns="none", sample_index=2),
        ]
        write_lines(step_file(tmp_path, 7), records)
        index = TrajectoryIndex(tmp_path / "trajectories")
        assert index.refresh(FOREVER)
        first, failed, last = rows_of(index)
        length = len(records[0]["token_ids"])
        assert first == {
            "step": 7, "line": 0, "task": 0, "sample": 0, "outcome": "answered", "correct": 0,
            "reward": 0.0, "advantage": -0.25, "sampled": sum(records[0]["loss_mask"]),
            "tokens": length, "turns": 2, "answer": "x",
        }  # fmt: skip
        assert (failed["line"], failed["correct"], failed["reward"]) == (2, None, None)
        assert (last["line"], last["answer"], last["turns"]) == (5, "é" * 200, 0)
        assert index.tasks == [("a", "Where is a?"), ("b", "Where is b?")]
        assert index.num_damaged == 2
        for line in (0, 2, 5):
            assert index.read(7, line) == records[line]

    def test_a_text_cannot_forge_the_lists(self):
        text = ', "token_ids": [1, 2], "loss_mask": [1]}' + HOSTILE
        record = trajectory(query=text, final_answer=text)
        head, num_tokens, num_sampled = parse_leading_fields(json.dumps(record).encode())
        assert (head["query"], head["final_answer"]) == (text, text)
        assert num_tokens == len(record["token_ids"])
        assert num_sampled == sum(record["loss_mask"])

    def test_files_that_change_or_go(self, tmp_path):
        write_trajectories(tmp_path, steps=[1, 2])
        index = TrajectoryIndex(tmp_path / "trajectories")
        index.refresh(FOREVER)
        os.mkfifo(step_file(tmp_path, 4))  # would never end
        shutil.copy(step_file(tmp_path, 1), f"{step_file(tmp_path, 5)}.unfinished")
        assert not index.refresh(FOREVER)
        assert [row[0] for row in index.rows] == [2] * 4 + [1] * 4  # the newest first
        write_trajectories(tmp_path, steps=[3], num=1)
        index.refresh(FOREVER)
        assert (index.generation, [row[0] for row in index.rows]) == (0, [2] * 4 + [1] * 4 + [3])
        write_trajectories(tmp_path, steps=[2], num=2)
        step_file(tmp_path, 1).unlink()
        assert index.refresh(FOREVER)
        assert (index.generation, [row[0] for row in index.rows]) == (1, [3, 2, 2])
