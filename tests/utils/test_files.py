import subprocess
import sys

import pytest

from jaxrl.utils.files import (
    FolderMovedError,
    append_line,
    atomic_folder,
    begin_replacing,
    find_disk_full_error,
    lock_folder,
    open_atomic,
    quarantine_file,
    recover,
    remove_atomic,
)
from tests.helpers import no_file_beyond


def test_a_file_is_written_completely_or_not_at_all(tmp_path):
    path = tmp_path / "folder" / "file"
    with open_atomic(path) as file:
        file.write("old")
        assert not path.exists()
    with pytest.raises(TypeError), open_atomic(path) as file:
        file.writelines(["new", None])
    assert path.read_text() == "old"


def test_a_folder_is_written_completely_or_not_at_all(tmp_path):
    path = tmp_path / "out" / "folder"
    for text in ("first", "second"):
        with atomic_folder(path, marker="x") as folder:
            (folder / "x").write_text(text)
            assert not path.exists() or (path / "x").read_text() == "first"
        assert (path / "x").read_text() == text
        assert list(path.parent.iterdir()) == [path]
    with pytest.raises(OSError, match="x/y"), atomic_folder(path, marker="x") as folder:
        (folder / "x" / "y").write_text("third")
    assert (path / "x").read_text() == "second"
    assert list(path.parent.iterdir()) == [path]
    not_ours = pytest.raises(FileExistsError, match="contains no y, so it is not an earlier output")
    with not_ours, atomic_folder(path, marker="y"):
        pass


@pytest.mark.parametrize("num_steps_before_kill", [1, 2, 3])
def test_a_folder_recovers_from_a_kill_at_any_step_of_its_replacement(
    tmp_path, num_steps_before_kill
):
    path, new = tmp_path / "7", tmp_path / "new"
    for folder in (path, new):
        folder.mkdir()
        (folder / "x").write_text(folder.name)
    steps = [
        lambda: begin_replacing(path),
        lambda: new.rename(path),
        lambda: (tmp_path / "7.replaced").rename(tmp_path / "7.removed"),
    ]
    for step in steps[:num_steps_before_kill]:
        step()
    recover(path)
    assert (path / "x").read_text() == ("7" if num_steps_before_kill == 1 else "new")
    assert {file.name for file in tmp_path.iterdir()} - {"new"} == {"7"}
    recover(path)
    remove_atomic(path)
    assert {file.name for file in tmp_path.iterdir()} - {"new"} == set()


def test_a_full_disk_is_reported_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    too_large = pytest.raises(OSError, match="too large")
    with no_file_beyond(100), too_large as raised, open_atomic(path) as file:
        file.write("new" * 100)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]
    assert find_disk_full_error(raised.value).filename == str(path)


def test_nothing_is_written_to_a_locked_folder_that_was_moved(tmp_path):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    with lock_folder(folder):
        with open_atomic(folder / "eval" / "a") as file:
            file.write("old")
        folder.rename(moved)
        with pytest.raises(FolderMovedError, match=str(folder)):
            open_atomic(folder / "eval" / "b").__enter__()
        with pytest.raises(FolderMovedError, match=str(folder)):
            atomic_folder(folder / "export", marker="x").__enter__()
        assert list(tmp_path.iterdir()) == [moved]
        folder.symlink_to(moved)  # it exists again under its old name
        with open_atomic(folder / "eval" / "b") as file:
            file.write("new")
    moved.rename(tmp_path / "later")  # no longer locked
    folder.unlink()
    with open_atomic(folder / "b") as file:
        file.write("new")


HOLD = """
import sys, time
from pathlib import Path
from jaxrl.utils.files import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_is_locked_by_one_process_until_it_is_killed(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    in_use = pytest.raises(ValueError, match=rf"is in use by process {process.pid} on ")
    with in_use, lock_folder(folder):
        pass
    process.kill()
    process.wait()
    for _ in range(2):
        with lock_folder(folder):
            pass


def test_damaged_files_are_kept_under_other_names(tmp_path):
    path = tmp_path / "x.json"
    paths = []
    for text in "ab":
        path.write_text(text)
        paths.append(quarantine_file(path))
    assert [path.name for path in paths] == ["x.json.damaged", "x.json.damaged.1"]
    assert [path.read_text() for path in paths] == ["a", "b"]
    assert not path.exists()


def test_a_line_is_appended_after_a_truncated_one(tmp_path):
    path = tmp_path / "lines"
    append_line(path, "one")
    append_line(path, "tw\ud800")
    path.write_bytes(path.read_bytes() + b"cut")
    append_line(path, "three")
    assert path.read_text() == "one\ntw\ufffd\ncut\nthree\n"
