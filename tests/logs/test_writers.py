import dataclasses
import json
import math
import shutil
import struct
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from jaxrl.builders.resolved import check_tracker_packages
from jaxrl.config import default_config
from jaxrl.envs.base import Task
from jaxrl.logs.trackers import (
    FailSafeTracker,
    TensorBoard,
    open_metrics_log,
)
from jaxrl.logs.writers import MetricsLog, write_trajectories
from jaxrl.utils.files import FolderMovedError, lock_folder
from tests.episodes import make_failure, make_trajectory
from tests.helpers import no_file_beyond, resolved, settings_of


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestLog:
    def test_numbers_of_any_kind_become_json(self, path):
        log = MetricsLog(path, 0)
        values = {"a": 1, "b": np.float32(0.5), "c": jnp.int32(3), "d": math.nan, "e": -math.inf}
        log.write(7, "train", values)
        [record] = read(path)
        assert record.pop("timing_s/wall") >= 0
        assert list(record) == ["step", "stage", "a", "b", "c", "d", "e"]
        assert list(record.values()) == [7, "train", 1, 0.5, 3, None, None]
        assert "NaN" not in path.read_text()

    def test_records_after_the_checkpoint_are_cut(self, path):
        log = MetricsLog(path, 0)
        for step in range(5):
            log.write(step, "train", {})
        assert log.num_records == 5
        with path.open("a") as file:
            file.write('{"step": 5, "sta')  # killed while it wrote
        log = MetricsLog(path, 3)
        assert log.num_records == 3
        log.write(3, "train", {"again": 1})
        assert [record["step"] for record in read(path)] == [0, 1, 2, 3]
        assert list(path.parent.iterdir()) == [path]

    def test_no_record_is_written_where_a_moved_run_was(self, tmp_path):
        folder = tmp_path / "run"
        with lock_folder(folder):
            log = MetricsLog(folder / "metrics.jsonl", 0)
            folder.rename(tmp_path / "moved")
            folder.mkdir()  # as Orbax does, if it is writing a checkpoint
            with pytest.raises(FolderMovedError):
                log.write(0, "train", {})
        assert not list(folder.iterdir())

    @pytest.mark.parametrize("num_kept", [None, 0, 3])
    def test_lost_records_are_reported_and_counted(self, path, num_kept):
        messages = []
        lines = [f'{{"step": {step}, "stage": "train"}}\n' for step in range(9)]
        if num_kept is not None:
            path.write_text("".join(lines[:num_kept]))
        log = MetricsLog(path, 9, log=messages.append)
        [warning] = messages
        assert f"{path} contains {num_kept or 0} of the 9 records" in warning
        assert log.num_records == 9  # as W&B counts them
        # Killed before the next checkpoint, the run resumes from the same one.
        log.write(9, "train", {})
        MetricsLog(path, 9, is_later=lambda record: record["step"] > 8, log=messages.append)
        assert path.read_text() == "".join(lines[: num_kept or 0])

    @pytest.mark.parametrize("bad", ["{", '{"stage": "train"}', "\udcff", "[" * 9999])
    def test_a_bad_line_is_named_and_moved_aside(self, path, bad):
        messages = []
        text = f'{{"step": 1}}\n{bad}\n{{"step": 3}}\n{{"step": 4}}\n'
        path.write_text(text, errors="surrogateescape")
        log = MetricsLog(path, 3, log=messages.append)
        aside = path.with_name("metrics.jsonl.damaged")
        assert f"{path}:2 is not a valid record" in messages[0]
        assert "contains 2 of the 3 records" in messages[1]
        assert aside.read_text(errors="surrogateescape") == text
        assert [record["step"] for record in log.read_records()] == [1, 3]


def test_trajectories_as_json(tmp_path):
    chat = ({"role": "system", "content": "Search."}, {"role": "user", "content": "Warum ?"})
    members = [make_trajectory(reward=1.0, parts={"exact_match": 1.0}), make_failure()]
    members[0] = dataclasses.replace(members[0], advantage=0.25)
    members[1] = dataclasses.replace(members[1], task=Task(id="t1", messages=chat))
    file = tmp_path / "trajectories" / "step_000001.jsonl"
    fields = [{"difficulty": "hard"}, {"difficulty": None}]
    write_trajectories(file, members, fields)
    good, failed = read(file)
    assert (good["difficulty"], failed["difficulty"]) == ("hard", None)
    assert (good["question"], good["answers"], good["advantage"]) == ("Où ?", ["x"], 0.25)
    assert (good["query"], failed["query"], failed["question"]) == ("Où ?", "Warum ?", None)
    assert failed["advantage"] is None  # nobody has computed it
    assert (good["outcome"], failed["outcome"]) == ("answered", "environment_error")
    assert (good["reward"], failed["reward"]) == (1.0, None)  # an error is no reward of 0
    assert good["token_ids"] == members[0].token_ids.tolist()
    assert good["loss_mask"] == [0, 0, 1, 1, 1, 1]
    assert good["policy_versions"] == [-1, -1, 3, 3, 3, 3]
    assert good["generated_text"] == "<search>q</search>\n\nfound\n\n<answer>x</answer>"
    assert [turn["tool_call"] for turn in good["turns"]] == ["q", None]
    assert failed["turns"][0]["error"] == "the server is down"
    assert "Où" in file.read_text(encoding="utf-8")


def test_values_between_records_are_added_to_the_next(path):
    log = MetricsLog(path, 0)
    log.add_to_next_record("timing_s/save_checkpoint", 0.5)
    log.add_to_next_record("timing_s/save_checkpoint", 0.25)
    log.write(1, "train", {})
    log.write(2, "train", {})
    first, second = read(path)
    assert first["timing_s/save_checkpoint"] == 0.75
    assert "timing_s/save_checkpoint" not in second


def read_events(folder):
    """Return steps and values as another reader of the format sees them.

    A record is its length (8 bytes), a checksum (4), the event, a checksum (4).
    """
    pairs = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            [size] = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            values = {v.tag: v.simple_value for v in event.summary.value}
            pairs += [(event.step, values)] if values else []
            data = data[16 + size :]
    return pairs


class TestTensorBoard:
    def write(self, workdir, num_records, steps):
        log = open_metrics_log(
            workdir, num_records, settings_of(default_config()), print, is_writer=True
        )
        for step in steps:
            log.write(step, "train", {"actor/entropy": step / 2, "nothing": math.nan})
        log.close()

    def test_every_record_is_mirrored(self, tmp_path):
        self.write(tmp_path, 0, [1, 2, 2])
        pairs = read_events(tmp_path / "tensorboard")
        entropies = [(step, values["actor/entropy"]) for step, values in pairs]
        assert entropies == [(1, 0.5), (2, 1.0), (2, 1.0)]
        assert set(pairs[0][1]) == {"actor/entropy", "timing_s/wall"}

    def test_a_full_disk_ends_the_mirror_without_waiting(self, tmp_path):
        messages = []
        make = partial(TensorBoard, tmp_path, [{"step": 1, "x": 1.0}])
        mirror = FailSafeTracker("tensorboard", make, messages.append)
        with no_file_beyond(50):
            for step in range(2, 30):
                mirror.write(step, {"step": step, "x": 1.0}, {})
            mirror.close()
        [warning] = messages
        assert warning.startswith("warning: the tracker 'tensorboard' failed and is left out")

    def test_records_that_a_restart_cuts_are_forgotten(self, tmp_path):
        self.write(tmp_path, 0, [1, 2, 3, 4])
        self.write(tmp_path, 2, [3])
        assert [step for step, _ in read_events(tmp_path / "tensorboard")] == [1, 2, 3]


def test_a_tracker_of_your_own_gets_records_and_samples(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "extending"))
    config, lines = default_config(), []
    config.log.trackers = ("my_tracker.SampleFiles",)
    log = open_metrics_log(tmp_path, 4, settings_of(config), lines.append, is_writer=True)
    lines.clear()  # the first four records are missing
    log.add_samples("train", [make_trajectory(reward=1.0, parts={"f1": 0.5}), make_failure()])
    log.write(5, "train", {})
    log.write(6, "train", {})
    first, second = (json.loads((tmp_path / f"samples/{n:06d}.json").read_text()) for n in (4, 5))
    assert (first["step"], [*second]) == (5, ["stage", "step"])
    good, failed = first["samples/train"]
    assert [*good] == [*failed]
    assert (good["reward"], good["reward/f1"], failed["reward"]) == (1.0, 0.5, None)
    assert (good["question"], good["final_answer"]) == ("Où ?", "x")
    # A tracker that fails is left out; the records continue.
    shutil.rmtree(tmp_path / "samples")
    for step in (7, 8):
        log.write(step, "train", {})
    log.close()
    [warning] = lines
    assert warning.startswith("warning: the tracker 'my_tracker.SampleFiles' failed")
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [5, 6, 7, 8]


def test_a_tracker_that_does_not_start_is_left_out(tmp_path):
    config, lines = default_config(), []
    (tmp_path / "tensorboard").write_text("a file in the way")
    log = open_metrics_log(tmp_path, 0, settings_of(config), lines.append, is_writer=True)
    log.write(1, "train", {})
    log.close()
    assert [line.startswith("warning: the tracker 'tensorboard' failed") for line in lines] == [
        True
    ]


def test_a_tracker_without_its_package_is_refused(tmp_path, monkeypatch):
    source = "class Mine:\n    package = 'absent'\n    write = close = print\n"
    (tmp_path / "absent_tracker.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = default_config()
    config.log.trackers = ("absent_tracker.Mine",)
    with pytest.raises(ValueError, match=r"config.log.trackers names 'absent_tracker.Mine'"):
        check_tracker_packages(resolved(config))
    config.log.trackers = ("json.dumps",)
    with pytest.raises(ValueError, match=r"config.log.trackers is 'json.dumps'; expected a class"):
        resolved(config)


def test_half_a_surrogate_pair_in_an_error_is_replaced(tmp_path):
    file = tmp_path / "step_000001.jsonl"
    failure = make_failure()
    turn = dataclasses.replace(failure.turns[-1], error="half a \ud83d pair")
    failure = dataclasses.replace(failure, turns=(turn,))
    write_trajectories(file, [failure], [{}])
    [line] = file.read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["turns"][-1]["error"] == "half a ? pair"
