"""What a start that goes on may change, what it needs consent for, and where it is written down."""

import json
import shutil

import pytest

from jaxrl.config.schema import default_config, flatten, to_json
from jaxrl.runtime import resume
from jaxrl.runtime.resume import (
    check_changes,
    check_fixed_keys,
    read_history,
    read_record,
    write_history,
)
from tests.helpers import without_keys_of

CONTENTS = {"tasks.train.source": "aa", "search.local.corpus": "cc", "model.path/config.json": "mm"}


def configured(**changes):
    config = default_config()
    config.model.path = "models/small"
    config.tasks.train.source = "data/train.jsonl"
    config.update_from_flattened_dict(changes)
    return config


def begin(workdir, *, step=40, config=None, position=None):
    """A workdir with one checkpoint, as a run of `config` leaves it."""
    config = config or configured()
    position = {"config": flatten(config), "contents": CONTENTS} if position is None else position
    file = workdir / "checkpoints" / str(step) / "position" / "metadata"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"step": step, **position}))
    (workdir / "config.json").write_text(to_json(config))
    (workdir / resume.HISTORY_FILE).touch()
    return config


def changes_since(record, config, contents=None):
    """The changes of a configuration since the record of a run."""
    return resume.find_changes(record, flatten(config), contents)


def refused(workdir, contents=None, **changes):
    """The keys that a start would be refused for."""
    begun = read_record(workdir)
    found = changes_since(begun, configured(**changes), contents)
    return [change.key for change in found if not change.is_free]


def test_the_same_again_is_no_change(tmp_path):
    begin(tmp_path)
    begun = read_record(tmp_path)
    assert (begun.step, begun.warnings) == (40, [])
    assert changes_since(begun, configured(), CONTENTS) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.lr", 1e-3),
        ("reward.weights", {"f1": 1.0}),
        ("model.path", "models/other"),
        ("seed", 7),
        ("env.search.protocol", "bapo"),
        ("advantage.name", "rloo"),
        ("rollout.group_size", 4),
        ("sft.optimizer.lr", 1e-3),
    ],
)
def test_another_experiment_needs_consent(tmp_path, key, value):
    config = configured(stages=("sft", "train"))
    begin(tmp_path, config=config, position={"config": flatten(config)})
    begun = read_record(tmp_path)
    config = configured(stages=("sft", "train"), **{key: value})
    changes = changes_since(begun, config)
    was = flatten(configured())[key]
    assert [str(change) for change in changes] == [f"config.{key}: {was!r} -> {value!r}"]
    with pytest.raises(ValueError, match=rf"step 40 .*config.{key}: .*--accept_changes"):
        check_changes(tmp_path, begun, changes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_steps", 500),
        ("checkpoint.every_steps", 3),
        ("mesh.fsdp", 2),
        ("rollout.max_num_seqs", 8),
        ("optimizer.micro_rows", 4),
        ("search.http.url", "http://elsewhere:8000/retrieve"),
        ("sft.num_steps", 3),  # no stage of this run
    ],
)
def test_what_changes_no_result_is_told_only(tmp_path, key, value):
    begin(tmp_path)
    [change] = changes_since(read_record(tmp_path), configured(**{key: value}))
    assert (change.key, change.is_free) == (key, True)


def test_more_steps_change_a_rate_that_falls(tmp_path):
    begin(tmp_path, config=configured(**{"optimizer.schedule": "cosine"}))
    assert refused(tmp_path, num_steps=500, **{"optimizer.schedule": "cosine"}) == ["num_steps"]


def test_prices_that_end_trajectories_are_part_of_it(tmp_path):
    paid = {"ledger.prices": {"search": 1.0}}
    begin(tmp_path, config=configured(**paid))
    dearer = {"ledger.prices": {"search": 2.0}, "ledger.max_cost": 9.0, "ledger.max_calls": 5}
    assert refused(tmp_path, **dearer) == []
    assert refused(tmp_path, **paid, **{"rollout.max_cost": 3.0}) == ["rollout.max_cost"]
    assert refused(tmp_path, **dearer, **{"rollout.max_cost": 3.0}) == [
        "ledger.prices",
        "rollout.max_cost",
    ]


def test_evaluations_that_steer_training_are_part_of_it(tmp_path):
    begin(tmp_path, config=configured(**{"checkpoint.keep_best": 1}))
    steered = {"checkpoint.keep_best": 1, "eval.samples": 4}
    assert refused(tmp_path, **steered) == ["eval.samples"]
    assert refused(tmp_path, **steered, stages=("evaluate",)) == []


def test_an_evaluation_alone_may_leave_training_aside(tmp_path):
    begin(tmp_path)
    only = {"stages": ("evaluate",)}
    free = {"eval.samples": 4, "eval.final_suites": ("greedy",), "optimizer.lr": 1.0}
    assert refused(tmp_path, **only, **free, **{"filter.name": "varied"}) == []
    asked = {"tasks.eval.source": "other.jsonl", "search.local.topk": 9}
    assert refused(tmp_path, **only, **asked) == ["search.local.topk", "tasks.eval.source"]


class TestContents:
    def test_code_that_only_training_reads(self, tmp_path):
        """An evaluation by itself goes on with another loss, and not with another environment."""
        begin(tmp_path)
        before, now = (
            CONTENTS | {"loss.name's file": kind, "env.name's file": kind} for kind in ("a", "b")
        )
        begun = read_record(tmp_path)
        begun.contents.update(before)
        free = {
            stages: {c.key: c.is_free for c in changes_since(begun, configured(stages=stages), now)}
            for stages in (("train", "evaluate"), ("evaluate",))
        }
        loss, env = "loss.name's file (content)", "env.name's file (content)"
        assert free["train", "evaluate"] == {loss: False, env: False}
        assert (free[("evaluate",)][loss], free[("evaluate",)][env]) == (True, False)

    def test_the_same_path_with_another_content(self, tmp_path):
        begin(tmp_path)
        now = {**CONTENTS, "tasks.train.source": "xx", "model.path/tokenizer.json": "new"}
        found = changes_since(read_record(tmp_path), configured(), now)
        keys = ["model.path/tokenizer.json (content)", "tasks.train.source (content)"]
        assert [change.key for change in found] == keys
        assert not any(change.is_free for change in found)
        assert str(found[1]) == "config.tasks.train.source (content): changed"

    def test_another_path_with_the_same_content(self, tmp_path):
        begin(tmp_path)
        moved = {"tasks.train.source": "elsewhere/train.jsonl", "model.path": "elsewhere/small"}
        found = changes_since(read_record(tmp_path), configured(**moved), CONTENTS)
        assert [(c.key, c.is_free) for c in found] == [(key, True) for key in sorted(moved)]
        assert refused(tmp_path, None, **moved) == []  # not known before the files are read
        other = {**CONTENTS, "tasks.train.source": "xx"}
        assert refused(tmp_path, other, **moved) == ["tasks.train.source"]


class TestOlderRuns:
    def test_without_newer_keys(self, tmp_path):
        begin(tmp_path, position={})
        fields = json.loads((tmp_path / "config.json").read_text())
        del fields["rollout"]["top_p"], fields["filter"]
        (tmp_path / "config.json").write_text(json.dumps(fields))
        assert changes_since(read_record(tmp_path), configured()) == []
        # It ran with what is the default now.
        assert refused(tmp_path, **{"rollout.top_p": 0.9}) == ["rollout.top_p"]

    def test_with_keys_that_are_gone_is_refused_without_consent(self, tmp_path):
        begin(tmp_path)
        fields = json.loads((tmp_path / "config.json").read_text())
        fields["rollout"]["num_slots"] = 8
        (tmp_path / "config.json").write_text(json.dumps(fields))
        told = r"this version does not have: config\.rollout\.num_slots\. Name another --workdir"
        with pytest.raises(ValueError, match=told):
            read_record(tmp_path)
        begun = read_record(tmp_path, accept_changes=True)
        assert "keys that this version does not have" in begun.warnings[0]
        [change] = changes_since(begun, configured(), CONTENTS)
        assert (str(change), change.is_free) == ("config.rollout.num_slots: 8 -> None", False)
        # From then on the workdir is of this version, also before its next checkpoint.
        resume.record_start(tmp_path, begun, [change], configured(), CONTENTS)
        [line], _ = read_history(tmp_path)
        assert line["changes"] == {"rollout.num_slots": {"before": 8, "now": None}}
        assert changes_since(read_record(tmp_path), configured(), CONTENTS) == []

    @pytest.mark.parametrize("rank", [0, 2])
    def test_with_keys_of_a_folder_that_is_not_there(self, tmp_path, rank):
        config = begin(tmp_path, config=configured(**{"model.lora.rank": rank}))
        del config.model.lora
        with without_keys_of("lora"):
            begun = read_record(tmp_path)
            assert changes_since(begun, config, CONTENTS) == []
            if not rank:
                return check_fixed_keys(tmp_path, begun, flatten(config), ["model.lora.rank"])
            told = r"model\.lora\.rank is 0, but .* began with 2; put jaxrl/extras/lora back"
            with pytest.raises(ValueError, match=told):
                check_fixed_keys(tmp_path, begun, flatten(config), ["model.lora.rank"])

    @pytest.mark.parametrize("damage", [None, "[]", "{", "nu\xff", "[" * 100_000])
    def test_a_lost_configuration_does_not_switch_the_guard_off(self, tmp_path, damage):
        begin(tmp_path)
        path = tmp_path / "config.json"
        if damage is None:
            path.unlink()
        else:
            path.write_text(damage, encoding="latin-1")
        [warning] = read_record(tmp_path).warnings
        assert warning.startswith(f"warning: {path} is missing or cannot be read (")
        assert warning.endswith("checkpoint 40 records the configuration")
        assert refused(tmp_path) == []
        assert refused(tmp_path, seed=7) == ["seed"]
        path.write_text("{}")
        assert refused(tmp_path, seed=7) == ["seed"]

    def test_nothing_tells(self, tmp_path):
        begin(tmp_path, position={})
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ValueError, match=r"cannot be read .* --accept_changes"):
            read_record(tmp_path)
        begun = read_record(tmp_path, accept_changes=True)
        assert begun.warnings[0].endswith("nothing records the configuration")
        assert changes_since(begun, configured(seed=7)) == []
        resume.write_config(tmp_path, configured(seed=7))
        assert (tmp_path / "config.json.damaged").read_text() == "{"
        assert json.loads((tmp_path / "config.json").read_text())["seed"] == 7


class TestHistory:
    def test_a_line_for_each_start_that_changes_something(self, tmp_path):
        write_history(tmp_path, None, [], CONTENTS, ["train"])
        begin(tmp_path)
        begun = read_record(tmp_path)
        write_history(tmp_path, begun, [], CONTENTS, ["train"])
        changes = changes_since(begun, configured(seed=7, num_steps=7), CONTENTS)
        write_history(tmp_path, begun, changes, CONTENTS, ["train"])
        [first, second], num_damaged = read_history(tmp_path)
        assert (first["step"], first["changes"], num_damaged) == (0, {}, 0)
        assert first["contents"] == CONTENTS
        assert second["changes"] == {
            "seed": {"before": 0, "now": 7},
            "num_steps": {"before": 100, "now": 7},
        }
        assert (second["step"], second["accepted"]) == (40, ["seed"])

    def test_what_was_accepted_is_what_counts(self, tmp_path):
        begin(tmp_path)
        other = {**CONTENTS, "search.local.corpus": "xx"}
        begun = read_record(tmp_path)
        write_history(tmp_path, begun, changes_since(begun, configured(), other), other, ["train"])
        assert refused(tmp_path, other) == []
        assert refused(tmp_path, CONTENTS) == ["search.local.corpus (content)"]

    def test_an_evaluation_alone_accepts_nothing_for_the_run(self, tmp_path):
        begin(tmp_path)
        other = {**CONTENTS, "search.local.corpus": "xx"}
        begun = read_record(tmp_path)
        changes = changes_since(begun, configured(stages=("evaluate",)), other)
        write_history(tmp_path, begun, changes, other, ["evaluate"])
        assert refused(tmp_path, CONTENTS) == []

    def test_a_lost_or_damaged_history_is_reported(self, tmp_path):
        begin(tmp_path)
        file = tmp_path / resume.HISTORY_FILE
        file.unlink()
        assert f"{file} is missing or has damaged lines" in read_record(tmp_path).warnings[0]
        write_history(tmp_path, None, [], CONTENTS, ["train"])
        with file.open("ab") as history:
            history.write(b'no\n{"changes": {}, "contents": "none"}\n{"changes": ')
        begun = read_record(tmp_path)
        assert f"{file} is missing or has damaged lines" in begun.warnings[0]
        changes = changes_since(begun, configured(seed=7))
        write_history(tmp_path, begun, changes, CONTENTS, ["train"])
        lines, num_damaged = read_history(tmp_path)
        assert (len(lines), num_damaged) == (2, 3)


LINE = {"number": 1, "sign": "bad", "from_step": 7, "to_step": 4, "lr_scale": 0.5}
LINE |= {"ledger": {}}


def filled(workdir):
    for step in range(1, 8):
        for name in (f"trajectories/step_{step:06d}.jsonl", f"eval/train_{step}.json"):
            (workdir / name).parent.mkdir(exist_ok=True)
            (workdir / name).write_text(f"of step {step}")
    (workdir / "metrics.jsonl").write_text("seven lines")
    (workdir / "sentinel.jsonl").write_text("one line")


def names(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_decisions_are_read_as_they_were_written(tmp_path):
    assert resume.read_rollbacks(tmp_path) == []
    resume.append_rollback(tmp_path, LINE)
    resume.append_rollback(tmp_path, LINE | {"to_step": 2})
    assert resume.read_rollbacks(tmp_path) == [LINE, LINE | {"to_step": 2}]


@pytest.mark.parametrize("text", [b'{"sign": "bad"}', b"[]", b"{", b"\xff"])
def test_a_damaged_decision_is_refused(tmp_path, text):
    (tmp_path / resume.ROLLBACKS_FILE).write_bytes(json.dumps(LINE).encode() + b"\n" + text + b"\n")
    with pytest.raises(ValueError, match=r"roll_backs.jsonl:2 is"):
        resume.read_rollbacks(tmp_path)


def test_what_was_written_later_is_set_aside(tmp_path):
    filled(tmp_path)
    resume.archive_later_output(tmp_path, 4, 1)
    aside = tmp_path / "rolled_back" / "1"
    later = [f"eval/train_{n}.json" for n in (5, 6, 7)]
    later += [f"trajectories/step_{n:06d}.jsonl" for n in (5, 6, 7)]
    assert names(aside) == sorted(["done", "metrics.jsonl", "sentinel.jsonl", *later])
    assert not {*later} & {*names(tmp_path)}
    assert (aside / "trajectories/step_000006.jsonl").read_text() == "of step 6"
    assert (tmp_path / "metrics.jsonl").read_text() == "seven lines"  # cut when it is opened


def test_what_is_done_is_not_done_again(tmp_path):
    filled(tmp_path)
    resume.archive_later_output(tmp_path, 4, 1)
    # The run went on, and was killed before its next checkpoint.
    (tmp_path / "trajectories/step_000005.jsonl").write_text("anew")
    (tmp_path / "metrics.jsonl").write_text("five lines")
    resume.archive_later_output(tmp_path, 4, 1)
    aside = tmp_path / "rolled_back" / "1"
    assert (aside / "trajectories/step_000005.jsonl").read_text() == "of step 5"
    assert (aside / "metrics.jsonl").read_text() == "seven lines"
    resume.delete_later_output(tmp_path, 4)
    assert not (tmp_path / "trajectories/step_000005.jsonl").exists()


def test_what_was_interrupted_is_finished(tmp_path, monkeypatch):
    filled(tmp_path)
    moves = []
    move = shutil.move

    def killed(path, target):
        moves.append(path)
        if len(moves) == 3:
            raise KeyboardInterrupt
        return move(path, target)

    monkeypatch.setattr(shutil, "move", killed)
    with pytest.raises(KeyboardInterrupt):
        resume.archive_later_output(tmp_path, 4, 1)
    resume.archive_later_output(tmp_path, 4, 1)
    aside = tmp_path / "rolled_back" / "1"
    assert len(names(aside)) == 9
    assert all((aside / f"eval/train_{n}.json").read_text() == f"of step {n}" for n in (5, 6, 7))
