"""What a return to an earlier checkpoint leaves on the disk, also where it is interrupted."""

import json
import shutil

import pytest

from jaxrl.runtime import rollback

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
    assert rollback.read(tmp_path) == []
    rollback.write_down(tmp_path, LINE)
    rollback.write_down(tmp_path, LINE | {"to_step": 2})
    assert rollback.read(tmp_path) == [LINE, LINE | {"to_step": 2}]


BAD = [{"to_step": -1}, {"to_step": 4.0}, {"lr_scale": 0}, {"lr_scale": 2.0}, {"sign": 3}]


@pytest.mark.parametrize(
    "text",
    [b'{"sign": "bad"}', b"[]", b"{", b"\xff", *(json.dumps(LINE | bad).encode() for bad in BAD)],
)
def test_a_damaged_decision_is_refused(tmp_path, text):
    (tmp_path / rollback.FILE).write_bytes(json.dumps(LINE).encode() + b"\n" + text + b"\n")
    with pytest.raises(ValueError, match=r"roll_backs.jsonl:2 is"):
        rollback.read(tmp_path)


def test_what_was_written_later_is_set_aside(tmp_path):
    filled(tmp_path)
    rollback.set_aside_after(tmp_path, 4, 1)
    aside = tmp_path / "rolled_back" / "1"
    later = [f"eval/train_{n}.json" for n in (5, 6, 7)]
    later += [f"trajectories/step_{n:06d}.jsonl" for n in (5, 6, 7)]
    assert names(aside) == sorted(["done", "metrics.jsonl", "sentinel.jsonl", *later])
    assert not {*later} & {*names(tmp_path)}
    assert (aside / "trajectories/step_000006.jsonl").read_text() == "of step 6"
    assert (tmp_path / "metrics.jsonl").read_text() == "seven lines"  # cut when it is opened


def test_what_is_done_is_not_done_again(tmp_path):
    filled(tmp_path)
    rollback.set_aside_after(tmp_path, 4, 1)
    # The run went on, and was killed before its next checkpoint.
    (tmp_path / "trajectories/step_000005.jsonl").write_text("anew")
    (tmp_path / "metrics.jsonl").write_text("five lines")
    rollback.set_aside_after(tmp_path, 4, 1)
    aside = tmp_path / "rolled_back" / "1"
    assert (aside / "trajectories/step_000005.jsonl").read_text() == "of step 5"
    assert (aside / "metrics.jsonl").read_text() == "seven lines"
    rollback.remove_later_files(tmp_path, 4)
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
        rollback.set_aside_after(tmp_path, 4, 1)
    rollback.set_aside_after(tmp_path, 4, 1)
    aside = tmp_path / "rolled_back" / "1"
    assert len(names(aside)) == 9
    assert all((aside / f"eval/train_{n}.json").read_text() == f"of step {n}" for n in (5, 6, 7))
