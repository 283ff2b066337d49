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

HOLD = "import sys, time\nfrom pathlib import Path\nfrom jaxrl.utils.files import lock_folder\n" + (
    "with lock_folder(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n"
)


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "folder" / "file"
    with open_atomic(path) as file:
        file.write("old")
        assert not path.exists()
    with pytest.raises(TypeError), open_atomic(path) as file:
        file.writelines(["new", None])
    assert path.read_text() == "old"


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
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
    with (
        pytest.raises(FileExistsError, match="holds no y, so it is not an earlier output"),
        atomic_folder(path, marker="y"),
    ):
        pass


@pytest.mark.parametrize("killed_after", [1, 2, 3])
def test_a_folder_is_settled_whenever_its_replacement_was_killed(tmp_path, killed_after):
    path, new = tmp_path / "7", tmp_path / "new"
    for folder in (path, new):
        folder.mkdir()
        (folder / "x").write_text(folder.name)
    steps = [
        lambda: begin_replacing(path),
        lambda: new.rename(path),
        lambda: (tmp_path / "7.replaced").rename(tmp_path / "7.removed"),
    ]
    for step in steps[:killed_after]:
        step()
    recover(path)
    assert (path / "x").read_text() == ("7" if killed_after == 1 else "new")
    assert {file.name for file in tmp_path.iterdir()} - {"new"} == {"7"}
    recover(path)
    remove_atomic(path)
    assert {file.name for file in tmp_path.iterdir()} - {"new"} == set()


def test_a_full_disk_takes_nothing_away_and_is_told(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with (
        no_file_beyond(100),
        pytest.raises(OSError, match="too large") as raised,
        open_atomic(path) as file,
    ):
        file.write("new" * 100)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]
    assert find_disk_full_error(raised.value).filename == str(path)


def test_nothing_is_written_where_a_held_folder_has_been(tmp_path):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    with lock_folder(folder):
        with open_atomic(folder / "eval" / "a") as file:
            file.write("old")
        folder.rename(moved)
        for write in (
            lambda: open_atomic(folder / "eval" / "b").__enter__(),
            lambda: atomic_folder(folder / "export", marker="x").__enter__(),
        ):
            with pytest.raises(FolderMovedError, match=str(folder)):
                write()
        assert list(tmp_path.iterdir()) == [moved]
        with open_atomic(tmp_path / "other" / "b") as file:
            file.write("new")
        folder.symlink_to(moved)  # under its old name it is there again
        with open_atomic(folder / "eval" / "b") as file:
            file.write("new")
    moved.rename(tmp_path / "later")  # held no more
    folder.unlink()
    with open_atomic(folder / "b") as file:
        file.write("new")


def test_a_folder_is_held_by_one_process_until_it_is_killed(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    with (
        pytest.raises(ValueError, match=rf"is in use by process {process.pid} on "),
        lock_folder(folder),
    ):
        pass
    process.kill()
    process.wait()
    with lock_folder(folder):
        pass
    with lock_folder(folder):
        pass


def test_damaged_files_are_kept_aside(tmp_path):
    path = tmp_path / "x.json"
    kept = []
    for text in "abc":
        path.write_text(text)
        kept.append(quarantine_file(path))
    assert [file.name for file in kept] == [f"x.json.damaged{end}" for end in ("", ".1", ".2")]
    assert [file.read_text() for file in kept] == ["a", "b", "c"]
    assert not path.exists()


def test_a_line_begins_where_a_cut_one_ends(tmp_path):
    path = tmp_path / "lines"
    append_line(path, "one")
    append_line(path, "tw\ud800")
    path.write_bytes(path.read_bytes() + b"cut")
    append_line(path, "three")
    assert path.read_text() == "one\ntw\ufffd\ncut\nthree\n"
