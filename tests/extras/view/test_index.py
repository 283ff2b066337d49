"""The index against a reading of whole files, line by line, and what changes under it."""

import json
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.extras.view import index
from jaxrl.extras.view.index import Filter, TrajectoryIndex, summary
from tests.extras.view.made import HOSTILE, OUTCOMES, drawn_record, step_file, write_lines
from tests.qwen import qwen3

TOKENIZER = qwen3()
DAMAGED = (
    *("", "   ", "{", "[1, 2]", '"text"', "null", '{"task_id": 3, "outcome": "answered"}'),
    *('{"task_id": "t"}', '{"outcome": "answered", "task_id": "t", "token_ids": [1', "\x00\x01"),
)
"""Lines that are no trajectory; the first two are empty, and count as nothing."""


def fill(workdir, *, seed=0, steps=range(1, 6), num=12):
    """Files of random trajectories among damaged lines."""
    rng = np.random.default_rng(seed)
    for step in steps:
        lines = [drawn_record(rng, TOKENIZER, has_lists=bool(step % 2)) for _ in range(num)]
        for line in DAMAGED:
            lines.insert(int(rng.integers(len(lines) + 1)), line)
        write_lines(step_file(workdir, step), lines)
    return workdir


def brute_force(workdir):
    """Records of all files with their steps and lines, parsed whole."""
    found = []
    for path in sorted((workdir / "trajectories").glob("*.jsonl")):
        for line, text in enumerate(path.read_bytes().split(b"\n")):
            try:
                record = json.loads(text)
            except ValueError:
                continue
            has_both = isinstance(record, dict) and {"task_id", "outcome"} <= record.keys()
            if has_both and isinstance(record["task_id"], str):
                found.append((int(path.stem[5:]), line, record))
    return found


def read(workdir, cache=None):
    found = TrajectoryIndex(workdir / "trajectories", cache)
    found.refresh()
    return found


def test_the_index_is_what_a_whole_reading_finds(tmp_path):
    found = read(fill(tmp_path))
    table, expected = found.table, brute_force(tmp_path)
    assert len(table) == len(expected) == 60
    assert table.num_damaged == 5 * (len(DAMAGED) - 2)
    for row, (step, line, record) in enumerate(expected):
        numbers = {name: table.columns[name][row].item() for name in index.COLUMNS}
        assert (numbers["step"], numbers["line"]) == (step, line)
        assert table.text("task", row) == record["task_id"]
        assert table.text("outcome", row) == record["outcome"]
        assert table.text("question", row) == record["query"]
        assert table.text("answer", row) == record["final_answer"]
        is_failed = record["outcome"] == "environment_error"
        assert numbers["correct"] == (-1 if is_failed else record["is_correct"])
        for name in ("reward", "advantage"):
            assert math.isnan(numbers[name]) if is_failed else numbers[name] == record[name]
        assert numbers["tokens"] == len(record["token_ids"])
        assert numbers["sampled"] == sum(record["loss_mask"])
        assert numbers["turns"] == len(record["turns"]) == 2
        assert numbers["sample"] == record["sample_index"]
        assert found.read(step, line) == record


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    workdir = fill(tmp_path_factory.mktemp("run"), steps=range(1, 12), num=30)
    return read(workdir).table, brute_force(workdir)


amounts = st.none() | st.floats(-2, 2, allow_nan=False)
steps = st.none() | st.integers(0, 13)


@settings(deadline=None, max_examples=200)
@given(
    wanted=st.builds(
        Filter,
        outcomes=st.lists(st.sampled_from([*OUTCOMES, "none such"]), max_size=3).map(tuple),
        correct=st.sampled_from(["", "right", "wrong", "unscored"]),
        reward_min=amounts,
        reward_max=amounts,
        step_min=steps,
        step_max=steps,
        text=st.sampled_from(["", "ada", "ADA KERR", "élys", "ÉLYS", "strasse", "字", "?", "zz"]),
        task=st.none() | st.sampled_from(["task 1", "task 5", "task"]),
    )
)
def test_filters_are_what_a_loop_over_all_records_keeps(filled, wanted):
    table, records = filled

    def is_wanted(step, record):
        reward, outcome = record["reward"], record["outcome"]
        is_scored = outcome != "environment_error"
        verdict = ("right" if record["is_correct"] else "wrong") if is_scored else "unscored"
        has_bound = wanted.reward_min is not None or wanted.reward_max is not None
        return (
            (not wanted.outcomes or outcome in wanted.outcomes)
            and wanted.correct in ("", verdict)
            and not (has_bound and reward is None)
            and (wanted.reward_min is None or reward >= wanted.reward_min)
            and (wanted.reward_max is None or reward <= wanted.reward_max)
            and (wanted.step_min is None or step >= wanted.step_min)
            and (wanted.step_max is None or step <= wanted.step_max)
            and wanted.text.casefold() in record["query"].casefold()
            and wanted.task in (None, record["task_id"])
        )

    expected = [n for n, (step, _, record) in enumerate(records) if is_wanted(step, record)]
    assert wanted.rows(table).tolist() == expected


class TestSummary:
    def test_a_text_cannot_pass_for_the_lists(self):
        record = drawn_record(np.random.default_rng(0), TOKENIZER)
        record["query"] = ', "token_ids": [1, 2], "loss_mask": [1]}'
        record["final_answer"] = HOSTILE
        found = summary(json.dumps(record).encode())
        assert found["question"] == record["query"]
        assert found["answer"] == HOSTILE[: index.MAX_ANSWER]
        assert found["tokens"] == len(record["token_ids"])

    def test_a_key_of_that_name_within_another_object(self):
        record = {"task_id": "t", "outcome": "answered", "more": {"a": 1, "token_ids": [1, 2]}}
        record |= {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
        found = summary(json.dumps(record).encode())
        assert (found["tokens"], found["sampled"]) == (3, 2)

    @pytest.mark.parametrize("separators", [(",", ":"), (" ,  ", " : ")])
    def test_other_blanks(self, separators):
        record = drawn_record(np.random.default_rng(1), TOKENIZER)
        line = json.dumps(record, separators=separators).encode()
        assert summary(line) == summary(json.dumps(record).encode())

    def test_no_tokens(self):
        record = {"task_id": "t", "outcome": "answered", "token_ids": [], "loss_mask": []}
        assert summary(json.dumps(record).encode())["tokens"] == 0

    def test_values_of_other_kinds_are_as_good_as_missing(self):
        record = {
            "task_id": "t", "outcome": "x", "reward": "much", "advantage": math.inf, "turns": 3,
            "query": ["?"], "question": 7, "final_answer": None, "is_correct": "yes",
            "sample_index": 2**40, "attempt": True, "token_ids": {}, "loss_mask": "1",
        }  # fmt: skip
        found = summary(json.dumps(record).encode())
        assert math.isnan(found.pop("reward"))
        assert math.isnan(found.pop("advantage"))
        assert found == {
            "task": "t", "outcome": "x", "question": "", "answer": "", "correct": 0, "turns": 0,
            "sample": -1, "attempt": -1, "tokens": 0, "sampled": 0,
        }  # fmt: skip

    def test_nested_too_deeply(self):
        deep = '{"task_id": "t", "outcome": "x", "a": ' + "[" * 100_000 + "]" * 100_000 + "}"
        assert summary(deep.encode()) is None


class TestChanges:
    def test_a_run_that_grows(self, tmp_path):
        found = TrajectoryIndex(tmp_path / "trajectories", None)
        assert not found.refresh()
        assert len(found.table) == 0
        fill(tmp_path, steps=[3])
        assert found.refresh()
        assert not found.refresh()
        fill(tmp_path, steps=[1])
        assert found.refresh()
        assert found.table.columns["step"].tolist() == [1] * 12 + [3] * 12

    def test_a_step_that_is_done_again(self, tmp_path):
        found = read(fill(tmp_path, steps=[1, 2]))
        fill(tmp_path, seed=9, steps=[2], num=3)
        with pytest.raises(ValueError, match=r"step_000002.jsonl has changed since it was read"):
            found.read(2, 0 if 0 in found.table.columns["line"][12:] else 1)
        assert found.refresh()
        expected = brute_force(tmp_path)
        rewards = [np.nan if r["reward"] is None else r["reward"] for *_, r in expected]
        np.testing.assert_array_equal(found.table.columns["reward"], rewards)

    def test_a_step_that_is_gone(self, tmp_path):
        found = read(fill(tmp_path, steps=[1, 2]))
        step_file(tmp_path, 1).unlink()
        assert found.refresh()
        assert set(found.table.columns["step"].tolist()) == {2}
        with pytest.raises(LookupError, match="no trajectory at step 1, line 1"):
            found.read(1, 0)

    def test_a_file_that_cannot_be_read_is_told(self, tmp_path, monkeypatch):
        found = TrajectoryIndex(fill(tmp_path, steps=[1, 2]) / "trajectories", None)
        real = index.index_file

        def refuse(path, step, code):
            if step == 1:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, step, code)

        with monkeypatch.context() as patched:
            patched.setattr(index, "index_file", refuse)
            assert found.refresh()
            assert not found.refresh()
        assert found.problems == ["step_000001.jsonl cannot be read: Permission denied"]
        assert (found.num_files, found.num_indexed, len(found.table)) == (2, 1, 12)
        assert found.refresh()
        assert (found.problems, len(found.table)) == ([], 24)

    def test_other_files_are_not_read(self, tmp_path):
        fill(tmp_path, steps=[1])
        folder = tmp_path / "trajectories"
        for name in ("step_2.jsonl", "step_000003.jsonl.unfinished", "other.jsonl"):
            (folder / name).write_bytes(step_file(tmp_path, 1).read_bytes())
        os.mkfifo(folder / "step_000004.jsonl")  # of which no end is ever read
        (folder / "step_000005.jsonl").mkdir()
        found = read(tmp_path)
        assert (found.num_files, len(found.table)) == (1, 12)

    def test_a_line_without_an_end_is_not_held(self, tmp_path, monkeypatch):
        monkeypatch.setattr(index, "MAX_LINE", 20_000)
        fill(tmp_path, steps=[1])
        with step_file(tmp_path, 1).open("a") as file:
            file.write('{"task_id": "' + "x" * 50_000 + '"}\n')
            file.write(json.dumps(drawn_record(np.random.default_rng(5), TOKENIZER)))
        table = read(tmp_path).table
        assert (len(table), table.num_damaged) == (13, len(DAMAGED) - 2 + 1)


class TestCache:
    @pytest.fixture
    def kept(self, tmp_path):
        """A run, the file that keeps its index, and the table that was kept."""
        cache = tmp_path / "cache" / "index.npz"
        return tmp_path, cache, read(fill(tmp_path), cache).table

    def same(self, table, other):
        for name in index.COLUMNS.keys() - index.TEXTS:
            np.testing.assert_array_equal(table.columns[name], other.columns[name])
        for name in index.TEXTS:
            texts = [[one.text(name, row) for row in range(len(one))] for one in (table, other)]
            assert texts[0] == texts[1]
        assert table.num_damaged == other.num_damaged

    def test_nothing_is_read_again(self, kept, monkeypatch):
        workdir, cache, table = kept
        monkeypatch.setattr(index, "index_file", lambda *_: pytest.fail("a file was read"))
        self.same(read(workdir, cache).table, table)

    def test_what_has_changed_is(self, kept):
        workdir, cache, _ = kept
        fill(workdir, seed=4, steps=[2, 8], num=5)
        self.same(read(workdir, cache).table, read(workdir).table)
        self.same(read(workdir, cache).table, read(workdir).table)

    @pytest.mark.parametrize("damage", ["cut", "empty", "text", "version", "codes", "short"])
    def test_a_damaged_one_is_made_again(self, kept, damage):
        workdir, cache, table = kept
        whole = dict(np.load(cache))
        about = json.loads(whole["about"].tobytes())
        if damage in ("cut", "empty"):
            cache.write_bytes(cache.read_bytes()[: 1000 if damage == "cut" else 0])
        elif damage == "text":
            cache.write_text("no archive")
        else:
            if damage == "version":
                about["version"] = 0
            elif damage == "codes":
                whole["task"][0] = 1000
            else:
                whole["reward"] = whole["reward"][:-1]
            whole["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
            np.savez(cache, **whole)
        self.same(read(workdir, cache).table, table)

    def test_where_none_can_be_kept_it_is_told(self, tmp_path):
        (tmp_path / "file").write_text("")
        found = read(fill(tmp_path), tmp_path / "file" / "index.npz")
        assert len(found.table) == 60
        assert "the index is not kept in" in found.problems[0]
