"""Changes that a resumed run may make, the record of them, and output after a rollback."""

import json
import shutil

import pytest

from jaxrl.config.schema import default_config, flatten_config, serialize_config
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


def begin(workdir, *, position=None, **changes):
    """Create a workdir with a checkpoint at step 40; return the configuration."""
    config = configured(**changes)
    position = (
        {"config": flatten_config(config), "contents": CONTENTS} if position is None else position
    )
    file = workdir / "checkpoints" / "40" / "position" / "metadata"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"step": 40, **position}))
    (workdir / "config.json").write_text(serialize_config(config))
    (workdir / resume.HISTORY_FILE).touch()
    return config


def find_changes(workdir, contents=(), **changes):
    """Return the changes of a configuration since the record of a run."""
    return resume.find_changes(
        read_record(workdir), flatten_config(configured(**changes)), dict(contents)
    )


def find_refused(workdir, contents=(), **changes):
    """Return the keys that need consent."""
    return [
        change.key for change in find_changes(workdir, contents, **changes) if not change.is_free
    ]


def test_the_same_configuration_is_no_change(tmp_path):
    begin(tmp_path)
    record = read_record(tmp_path)
    assert (record.step, record.warnings) == (40, [])
    assert find_changes(tmp_path, CONTENTS) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.lr", 1e-3),
        ("reward.weights", {"f1": 1.0}),
        ("model.path", "models/other"),
        ("rollout.group_size", 4),
        ("sft.optimizer.lr", 1e-3),
    ],
)
def test_another_experiment_needs_consent(tmp_path, key, value):
    stages = {"stages": ("sft", "train")}
    config = begin(tmp_path, position={}, **stages)
    changes = find_changes(tmp_path, **stages, **{key: value})
    before = flatten_config(config)[key]
    assert [str(change) for change in changes] == [f"config.{key}: {before!r} -> {value!r}"]
    with pytest.raises(ValueError, match=rf"step 40 .*config.{key}: .*--accept_changes"):
        check_changes(tmp_path, read_record(tmp_path), changes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_steps", 500),
        ("num_epochs", 2),
        ("mesh.fsdp", 2),
        ("optimizer.micro_rows", 4),
        ("search.http.url", "http://elsewhere:8000/retrieve"),
        ("sft.num_steps", 3),  # not a stage of this run
    ],
)
def test_a_change_without_effect_on_results_is_free(tmp_path, key, value):
    begin(tmp_path)
    [change] = find_changes(tmp_path, **{key: value})
    assert (change.key, change.is_free) == (key, True)


EPOCHS = {"num_steps": 0, "num_epochs": 3}
COSINE = {"optimizer.schedule": "cosine"}
PRICES = {"ledger.prices": {"search": 1.0}}
OTHER_PRICES = {"ledger.prices": {"search": 2.0}, "ledger.max_cost": 9.0, "ledger.max_calls": 5}
LIMIT = {"rollout.max_cost": 3.0}
KEEP_BEST = {"checkpoint.keep_best": 1}
EVALUATE = {"stages": ("evaluate",)}
HOLDOUT = {"tasks.eval.holdout": 0.1}
OTHER_TASKS = {"tasks.train.columns": {"problem": "question"}}


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        # The number of steps determines a decaying learning rate.
        (COSINE, COSINE | {"num_steps": 500}, ["num_steps"]),
        (COSINE, COSINE | {"num_epochs": 2}, ["num_epochs"]),
        # A start records the steps that it has computed for the epochs.
        (COSINE | {"num_steps": 75, "num_epochs": 3}, COSINE | EPOCHS, []),
        # Prices matter only if they limit trajectories.
        (PRICES, OTHER_PRICES, []),
        (PRICES, OTHER_PRICES | LIMIT, ["ledger.prices", "rollout.max_cost"]),
        # Evaluations matter only if they select checkpoints.
        ({}, {"eval.samples": 4}, []),
        (KEEP_BEST, KEEP_BEST | {"eval.samples": 4}, ["eval.samples"]),
        # An evaluation alone ignores the settings of training.
        (KEEP_BEST, EVALUATE | KEEP_BEST | {"eval.samples": 4}, []),
        ({}, EVALUATE | {"optimizer.lr": 1.0, "filter.name": "varied"}, []),
        ({}, EVALUATE | {"tasks.eval.source": "other.jsonl"}, ["tasks.eval.source"]),
        # The training tasks decide which of them are held out.
        ({}, EVALUATE | OTHER_TASKS, []),
        (HOLDOUT, EVALUATE | HOLDOUT | OTHER_TASKS, ["tasks.train.columns"]),
    ],
)
def test_changes_need_consent_if_they_affect_results(tmp_path, before, now, refused):
    begin(tmp_path, **before)
    assert find_refused(tmp_path, **now) == refused


def test_an_evaluation_alone_ignores_code_that_only_training_uses(tmp_path):
    files = {"loss.name's file": "a", "env.name's file": "a"}
    position = {"config": flatten_config(configured()), "contents": CONTENTS | files}
    begin(tmp_path, position=position)
    now = CONTENTS | dict.fromkeys(files, "b")
    loss, env = "loss.name's file (content)", "env.name's file (content)"
    assert sorted(find_refused(tmp_path, now)) == [env, loss]
    assert find_refused(tmp_path, now, stages=("evaluate",)) == [env]


def test_another_content_at_the_same_path_needs_consent(tmp_path):
    begin(tmp_path)
    now = {**CONTENTS, "tasks.train.source": "xx", "model.path/tokenizer.json": "new"}
    changes = find_changes(tmp_path, now)
    keys = ["model.path/tokenizer.json (content)", "tasks.train.source (content)"]
    assert [(change.key, change.is_free) for change in changes] == [(key, False) for key in keys]
    assert str(changes[1]) == "config.tasks.train.source (content): changed"


def test_another_path_with_the_same_content_is_free(tmp_path):
    begin(tmp_path)
    moved = {"tasks.train.source": "elsewhere/train.jsonl", "model.path": "elsewhere/small"}
    changes = find_changes(tmp_path, CONTENTS, **moved)
    assert [(c.key, c.is_free) for c in changes] == [(key, True) for key in sorted(moved)]
    changed = {**CONTENTS, "tasks.train.source": "xx"}
    assert find_refused(tmp_path, changed, **moved) == ["tasks.train.source"]


SEARCH = {"weight": 0.7, "tasks.train.source": "a.jsonl", "env.search.tools": ["my.tool"]}
MIXTURE = {"environments": {"search": SEARCH, "math": {"env.name": "math"}}}


@pytest.mark.parametrize(
    ("now", "refused"),
    [
        (SEARCH | {"env.search.tools": ("my.tool",), "search.retries": 9}, []),
        (SEARCH | {"weight": 0.6}, ["environments.search.weight"]),
        (SEARCH | {"prompt.system": "new"}, ["environments.search.prompt.system"]),
        ({**SEARCH, "tasks": {"train": {"source": "moved.jsonl"}}, "tasks.train.source": None}, []),
    ],
)
def test_the_rule_of_an_overridden_key_applies_to_each_environment(tmp_path, now, refused):
    content = {"environments.search.tasks.train.source": "1"}
    begin(tmp_path, position={"contents": CONTENTS | content}, **MIXTURE)
    now = {key: value for key, value in now.items() if value is not None}
    changed = {"environments": {**MIXTURE["environments"], "search": now}}
    assert find_refused(tmp_path, CONTENTS | content, **changed) == refused
    if "tasks" in now:  # other tasks at the new path
        other = CONTENTS | {"environments.search.tasks.train.source": "2"}
        assert find_refused(tmp_path, other, **changed) == [*content]


def test_another_set_of_environments_needs_consent(tmp_path):
    begin(tmp_path, position={}, **MIXTURE)
    alone = {"environments": {"search": SEARCH}}
    assert find_refused(tmp_path, **alone) == ["environments.math.env.name"]
    assert find_refused(tmp_path, environments={})
    weights = {"environments": {**MIXTURE["environments"], "search": SEARCH | {"weight": 1.0}}}
    assert find_refused(tmp_path, stages=("evaluate",), **weights) == []


def test_new_keys_had_their_default_in_an_older_run(tmp_path):
    begin(tmp_path, position={})
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["rollout"]["top_p"], fields["filter"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert find_changes(tmp_path) == []
    assert find_refused(tmp_path, **{"rollout.top_p": 0.9}) == ["rollout.top_p"]


def test_removed_keys_of_an_older_run_need_consent(tmp_path):
    begin(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["rollout"]["num_slots"] = 8
    (tmp_path / "config.json").write_text(json.dumps(fields))
    message = r"this version does not have: config\.rollout\.num_slots\. Name another --workdir"
    with pytest.raises(ValueError, match=message):
        read_record(tmp_path)
    record = read_record(tmp_path, accept_changes=True)
    assert "keys that this version does not have" in record.warnings[0]
    [change] = resume.find_changes(record, flatten_config(configured()), CONTENTS)
    assert (str(change), change.is_free) == ("config.rollout.num_slots: 8 -> None", False)
    # Afterwards the workdir belongs to this version, even before its next checkpoint.
    resume.record_start(tmp_path, record, [change], configured(), CONTENTS)
    [line], _ = read_history(tmp_path)
    assert line["changes"] == {"rollout.num_slots": {"before": 8, "now": None}}
    assert find_changes(tmp_path, CONTENTS) == []


def test_keys_of_a_missing_extra_must_have_been_off(tmp_path):
    for rank in (0, 2):
        workdir = tmp_path / str(rank)
        config = begin(workdir, **{"model.lora.rank": rank})
        del config.model.lora
        with without_keys_of("lora"):
            record = read_record(workdir)
            assert resume.find_changes(record, flatten_config(config), CONTENTS) == []
            if rank:
                message = r"model\.lora\.rank is 0, but .* began with 2; put jaxrl/extras/lora back"
                with pytest.raises(ValueError, match=message):
                    check_fixed_keys(workdir, record, flatten_config(config), ["model.lora.rank"])
            else:
                check_fixed_keys(workdir, record, flatten_config(config), ["model.lora.rank"])


@pytest.mark.parametrize("damage", [None, "[]", "{", "nu\xff"])
def test_a_lost_configuration_is_read_from_the_checkpoint(tmp_path, damage):
    begin(tmp_path)
    path = tmp_path / "config.json"
    if damage is None:
        path.unlink()
    else:
        path.write_text(damage, encoding="latin-1")
    [warning] = read_record(tmp_path).warnings
    assert warning.startswith(f"warning: {path} is missing or cannot be read (")
    assert warning.endswith("checkpoint 40 records the configuration")
    assert find_refused(tmp_path) == []
    assert find_refused(tmp_path, seed=7) == ["seed"]


def test_a_configuration_lost_everywhere_needs_consent(tmp_path):
    begin(tmp_path, position={})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot be read .* --accept_changes"):
        read_record(tmp_path)
    record = read_record(tmp_path, accept_changes=True)
    assert record.warnings[0].endswith("nothing records the configuration")
    assert resume.find_changes(record, flatten_config(configured(seed=7)), {}) == []
    resume.write_config(tmp_path, configured(seed=7))
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 7


def test_history_has_a_line_for_each_start_that_changes_something(tmp_path):
    write_history(tmp_path, None, [], CONTENTS, ["train"])
    begin(tmp_path)
    record = read_record(tmp_path)
    write_history(tmp_path, record, [], CONTENTS, ["train"])
    changes = find_changes(tmp_path, CONTENTS, seed=7, num_steps=7)
    write_history(tmp_path, record, changes, CONTENTS, ["train"])
    [first, second], num_damaged = read_history(tmp_path)
    assert (first["step"], first["changes"], num_damaged) == (0, {}, 0)
    assert first["contents"] == CONTENTS
    assert second["changes"] == {
        "seed": {"before": 0, "now": 7},
        "num_steps": {"before": 100, "now": 7},
    }
    assert (second["step"], second["accepted"]) == (40, ["seed"])


@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_only_training_accepts_a_change_for_later_starts(tmp_path, stage):
    begin(tmp_path)
    changed = {**CONTENTS, "search.local.corpus": "xx"}
    changes = find_changes(tmp_path, changed, stages=(stage,))
    write_history(tmp_path, read_record(tmp_path), changes, changed, [stage])
    accepted, refused = (changed, CONTENTS) if stage == "train" else (CONTENTS, changed)
    assert find_refused(tmp_path, accepted) == []
    assert find_refused(tmp_path, refused) == ["search.local.corpus (content)"]


def test_a_lost_or_damaged_history_is_reported(tmp_path):
    begin(tmp_path)
    file = tmp_path / resume.HISTORY_FILE
    file.unlink()
    assert f"{file} is missing or has damaged lines" in read_record(tmp_path).warnings[0]
    write_history(tmp_path, None, [], CONTENTS, ["train"])
    with file.open("ab") as history:
        history.write(b'no\n{"changes": {}, "contents": "none"}\n{"changes": ')
    record = read_record(tmp_path)
    assert f"{file} is missing or has damaged lines" in record.warnings[0]
    write_history(tmp_path, record, find_changes(tmp_path, seed=7), CONTENTS, ["train"])
    lines, num_damaged = read_history(tmp_path)
    assert (len(lines), num_damaged) == (2, 3)


ROLLBACK = {"number": 1, "sign": "bad", "from_step": 7, "to_step": 4, "lr_scale": 0.5, "ledger": {}}


def test_rollbacks_are_read_as_written_and_damage_is_refused(tmp_path):
    assert resume.read_rollbacks(tmp_path) == []
    resume.append_rollback(tmp_path, ROLLBACK)
    resume.append_rollback(tmp_path, ROLLBACK | {"to_step": 2})
    assert resume.read_rollbacks(tmp_path) == [ROLLBACK, ROLLBACK | {"to_step": 2}]
    for line in (b'{"sign": "bad"}', b"{", b"\xff"):
        content = json.dumps(ROLLBACK).encode() + b"\n" + line + b"\n"
        (tmp_path / resume.ROLLBACKS_FILE).write_bytes(content)
        with pytest.raises(ValueError, match=r"roll_backs.jsonl:2 is"):
            resume.read_rollbacks(tmp_path)


def write_outputs(workdir):
    for step in range(1, 8):
        for name in (f"trajectories/step_{step:06d}.jsonl", f"eval/train_{step}.json"):
            (workdir / name).parent.mkdir(exist_ok=True)
            (workdir / name).write_text(f"of step {step}")
    (workdir / "metrics.jsonl").write_text("seven lines")
    (workdir / "sentinel.jsonl").write_text("one line")


def list_files(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_later_output_is_archived_once(tmp_path):
    write_outputs(tmp_path)
    resume.archive_later_output(tmp_path, 4, 1)
    archive = tmp_path / "rolled_back" / "1"
    later = [f"eval/train_{n}.json" for n in (5, 6, 7)]
    later += [f"trajectories/step_{n:06d}.jsonl" for n in (5, 6, 7)]
    assert list_files(archive) == sorted(["done", "metrics.jsonl", "sentinel.jsonl", *later])
    assert not {*later} & {*list_files(tmp_path)}
    assert (tmp_path / "metrics.jsonl").read_text() == "seven lines"  # cut when it is opened
    # The run continued and was killed before its next checkpoint.
    (tmp_path / "trajectories/step_000005.jsonl").write_text("again")
    (tmp_path / "metrics.jsonl").write_text("five lines")
    resume.archive_later_output(tmp_path, 4, 1)
    assert (archive / "trajectories/step_000005.jsonl").read_text() == "of step 5"
    assert (archive / "metrics.jsonl").read_text() == "seven lines"
    resume.delete_later_output(tmp_path, 4)
    assert not (tmp_path / "trajectories/step_000005.jsonl").exists()


def test_an_interrupted_archive_is_completed(tmp_path, monkeypatch):
    write_outputs(tmp_path)
    num_moves, move = 0, shutil.move

    def interrupt(path, target):
        nonlocal num_moves
        num_moves += 1
        if num_moves == 3:
            raise KeyboardInterrupt
        return move(path, target)

    monkeypatch.setattr(shutil, "move", interrupt)
    with pytest.raises(KeyboardInterrupt):
        resume.archive_later_output(tmp_path, 4, 1)
    resume.archive_later_output(tmp_path, 4, 1)
    archive = tmp_path / "rolled_back" / "1"
    assert len(list_files(archive)) == 9
    assert all((archive / f"eval/train_{n}.json").read_text() == f"of step {n}" for n in (5, 6, 7))
