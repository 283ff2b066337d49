"""Files of an index: complete or absent, whenever a build is killed."""

import os
import subprocess
import sys

import numpy as np
import pytest

from jaxrl.extras.dense import files
from jaxrl.extras.dense.files import IndexSpec, open_index
from tests.extras.dense.worlds import write_corpus
from tests.helpers import ROOT


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(files, "CHUNK_ROWS", 10)


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus.jsonl", 34)


def source(corpus, **changes):
    fields = {"settings": {"encoder": "a"}, "width": 3, "dtype": "float32", **changes}
    return IndexSpec(corpus=corpus, index_dir=corpus.parent / "index", **fields)


def expected_vectors(ids):
    return np.array([[i, i * i, 1 / (i + 1)] for i in ids], np.float32)


def build(source, *, kill_at=None, progress=lambda _: None):
    """Open an index. Return it and the ranges of documents that were encoded.

    Raise KeyboardInterrupt instead of encoding the documents from `kill_at` on.
    """
    encoded = []

    def make_rows(documents):
        def rows(start, stop):
            if kill_at is not None and start >= kill_at:
                raise KeyboardInterrupt
            encoded.append((start, stop))
            return expected_vectors([int(documents[i].id[1:]) for i in range(start, stop)])

        return rows

    return open_index(source, make_rows, progress), encoded


def test_built_once(corpus):
    progress = []
    built, encoded = build(source(corpus), progress=progress.append)
    np.testing.assert_array_equal(built.vectors, expected_vectors(range(34)))
    assert isinstance(built.vectors, np.memmap)
    assert [built.documents[i].id for i in (0, 33, 12)] == ["d0", "d33", "d12"]
    assert encoded == [(0, 10), (10, 20), (20, 30), (30, 34)]
    assert progress == [10, 20, 30, 34]
    again, encoded = build(source(corpus))
    np.testing.assert_array_equal(again.vectors, built.vectors)
    assert encoded == []
    # Every input of the vectors is part of the folder's name.
    others = [source(corpus, settings={"encoder": "b"}), source(corpus, dtype="bfloat16")]
    folders = {build(other)[0].folder for other in others}
    write_corpus(corpus, 35)
    folders |= {build(source(corpus))[0].folder, built.folder}
    assert len(folders) == 4


def test_killed_build_resumes(corpus, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        build(source(corpus), kill_at=30)
    [building] = (tmp_path / "index").glob("dense-*.building")
    # The kill may leave a part of the next chunk.
    with open(building / "vectors.bin", "r+b") as vectors:
        vectors.seek(30 * 12)
        vectors.write(b"half")
    built, encoded = build(source(corpus))
    assert encoded == [(30, 34)]
    np.testing.assert_array_equal(built.vectors, expected_vectors(range(34)))
    assert not building.exists()


def test_build_killed_before_its_first_vector(corpus, monkeypatch):
    def kill(*_):
        raise KeyboardInterrupt

    for name in ("_write_manifest", "_preallocate"):
        with monkeypatch.context() as patch:
            patch.setattr(files, name, kill)
            with pytest.raises(KeyboardInterrupt):
                build(source(corpus))
    np.testing.assert_array_equal(build(source(corpus))[0].vectors, expected_vectors(range(34)))


@pytest.mark.parametrize("file", ["vectors.bin", "lines.npy"])
def test_damage_is_reported(corpus, file):
    os.truncate(build(source(corpus))[0].folder / file, 100)
    with pytest.raises(ValueError, match="damaged; delete this folder"):
        build(source(corpus))


_BUILDER = """
import sys, time
from pathlib import Path
import numpy as np
from jaxrl.extras.dense import files

corpus, ready = Path(sys.argv[1]), Path(sys.argv[2])
files.CHUNK_ROWS = 10
encoded = []

def rows(start, stop):
    encoded.append(start)
    time.sleep(0.02)
    return np.full((stop - start, 3), start, np.float32)

source = files.IndexSpec(
    corpus=corpus, index_dir=corpus.parent / "index", settings={}, width=3, dtype="float32"
)
Path(f"{ready}/{sys.argv[3]}").touch()
while len(list(ready.iterdir())) < 2:
    time.sleep(0.01)
built = files.open_index(source, lambda documents: rows, lambda count: None)
print(len(encoded), built.vectors.sum())
"""


def test_several_processes_build_once(corpus, tmp_path):
    (tmp_path / "ready").mkdir()
    command = [sys.executable, "-c", _BUILDER, str(corpus), str(tmp_path / "ready")]
    workers = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for i in range(2)
    ]
    printed = sorted(worker.communicate(timeout=60)[0].split() for worker in workers)
    total = str(3.0 * (10 * 10 + 20 * 10 + 30 * 4))
    assert printed == [["0", total], ["4", total]]
