"""The files of an index: whole or not there, whenever a build is killed."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from jaxrl.extras.dense import files
from jaxrl.extras.dense.files import Source, open_built
from tests.extras.dense.worlds import write_corpus
from tests.helpers import ROOT


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(files, "CHUNK_ROWS", 10)


def source(corpus, **changes):
    fields = {"settings": {"encoder": "a"}, "width": 3, "dtype": "float32", **changes}
    return Source(corpus=corpus, index_dir=corpus.parent / "index", **fields)


class Rows:
    """Vectors that tell their documents apart; notes which were asked for, may die at one."""

    def __init__(self, killed_at=None):
        self.asked, self._killed_at = [], killed_at

    def __call__(self, documents):
        def rows(start, stop):
            if self._killed_at is not None and start >= self._killed_at:
                raise KeyboardInterrupt
            self.asked.append((start, stop))
            ids = [int(documents[i].id[1:]) for i in range(start, stop)]
            return np.array([[i, i * i, 1 / (i + 1)] for i in ids], np.float32)

        return rows


def wanted(count):
    return np.array([[i, i * i, 1 / (i + 1)] for i in range(count)], np.float32)


def build(source, rows):
    return open_built(source, rows, lambda _: None)


def test_built_once(tmp_path):
    corpus, rows, told = write_corpus(tmp_path / "corpus.jsonl", 34), Rows(), []
    built = open_built(source(corpus), rows, told.append)
    np.testing.assert_array_equal(built.vectors, wanted(34))
    assert isinstance(built.vectors, np.memmap)
    assert [built.documents[i].id for i in (0, 33, 12)] == ["d0", "d33", "d12"]
    assert rows.asked == [(0, 10), (10, 20), (20, 30), (30, 34)]
    assert told == [10, 20, 30, 34]
    again = build(source(corpus), rows)
    np.testing.assert_array_equal(again.vectors, wanted(34))
    assert len(rows.asked) == 4


@pytest.mark.parametrize("changes", [{"settings": {"encoder": "b"}}, {"corpus": 35}])
def test_what_it_was_made_of_is_its_name(tmp_path, changes):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 34)
    first = build(source(corpus), Rows()).folder
    if "corpus" in changes:
        write_corpus(corpus, changes.pop("corpus"))
    assert build(source(corpus, **changes), Rows()).folder != first


def test_a_killed_build_goes_on_where_it_was(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 34)
    with pytest.raises(KeyboardInterrupt):
        build(source(corpus), Rows(killed_at=20))
    [building] = (tmp_path / "index").glob("dense-*.building")
    # What a kill may leave: half a line, a chunk without its line, and one that the disk lost.
    with open(building / "chunks.jsonl", "ab") as log:
        log.write(b'\n{"chunk": 2, "sha')
    with open(building / "vectors.bin", "r+b") as vectors:
        vectors.write(b"lost")
    rows = Rows()
    built = build(source(corpus), rows)
    assert rows.asked == [(0, 10), (20, 30), (30, 34)]
    np.testing.assert_array_equal(built.vectors, wanted(34))
    assert not building.exists()


def test_killed_before_its_first_vector(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 12)
    monkeypatch.setattr(files, "_reserve", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build(source(corpus), Rows())
    monkeypatch.undo()
    monkeypatch.setattr(files, "CHUNK_ROWS", 10)
    np.testing.assert_array_equal(build(source(corpus), Rows()).vectors, wanted(12))


def test_a_corpus_that_grew_at_its_end_keeps_what_it_has(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 25)
    build(source(corpus), Rows())
    write_corpus(corpus, 34)
    rows = Rows()
    np.testing.assert_array_equal(build(source(corpus), rows).vectors, wanted(34))
    assert rows.asked == [(25, 30), (30, 34)]
    # Not where an earlier line is another now, nor with another encoder.
    lines = corpus.read_text().splitlines()
    corpus.write_text("\n".join([*lines[1:], lines[0], '{"id": "d99", "title": "", "text": "x"}']))
    for own in (source(corpus), source(corpus, settings={"encoder": "b"})):
        rows = Rows()
        build(own, rows)
        assert rows.asked[0] == (0, 10)


@pytest.mark.parametrize("damage", ["short"])
def test_damage_is_told(tmp_path, damage):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 34)
    folder = build(source(corpus), Rows()).folder
    vectors = folder / "vectors.bin"
    if damage == "byte":
        with open(vectors, "r+b") as file:
            file.seek(15 * 12)
            file.write(b"\x01")
    elif damage == "short":
        os.truncate(vectors, 100)
    else:
        (folder / "chunks.jsonl").unlink()
    with pytest.raises(ValueError, match="damaged; delete the folder"):
        build(source(corpus), Rows())
    shutil.rmtree(folder)
    np.testing.assert_array_equal(build(source(corpus), Rows()).vectors, wanted(34))


_BUILDER = """
import sys, time
from pathlib import Path
import numpy as np
from jaxrl.extras.dense import files

corpus, ready = Path(sys.argv[1]), Path(sys.argv[2])
files.CHUNK_ROWS = 10
asked = []

def rows(start, stop):
    asked.append(start)
    time.sleep(0.02)
    return np.full((stop - start, 3), start, np.float32)

source = files.Source(
    corpus=corpus, index_dir=corpus.parent / "index", settings={}, width=3, dtype="float32"
)
Path(f"{ready}/{sys.argv[3]}").touch()
while len(list(ready.iterdir())) < 3:
    time.sleep(0.01)
built = files.open_built(source, lambda documents: rows, lambda count: None)
print(len(asked), built.vectors.sum())
"""


def test_several_processes_build_once(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 34)
    (tmp_path / "ready").mkdir()
    command = [sys.executable, "-c", _BUILDER, str(corpus), str(tmp_path / "ready")]
    workers = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for i in range(3)
    ]
    printed = sorted(worker.communicate(timeout=60)[0].split() for worker in workers)
    total = str(3.0 * (10 * 10 + 20 * 10 + 30 * 4))
    assert printed == [["0", total], ["0", total], ["4", total]]
