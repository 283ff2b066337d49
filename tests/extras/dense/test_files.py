"""The files of an index: whole or not there, whenever a build is killed."""

import json
import os
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest

from jaxrl.envs.base import ToolError
from jaxrl.extras.dense import files
from jaxrl.extras.dense.files import Source, open_built
from tests.extras.dense.worlds import dense, documents, write_corpus
from tests.helpers import ROOT, no_file_beyond


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


@pytest.mark.parametrize(
    "changes", [{"settings": {"encoder": "b"}}, {"dtype": "bfloat16"}, {"corpus": 35}]
)
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


def test_another_corpus_begins_anew(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 34)
    with pytest.raises(KeyboardInterrupt):
        build(source(corpus), Rows(killed_at=20))
    write_corpus(corpus, 33)
    rows = Rows()
    build(source(corpus), rows)
    assert rows.asked[0] == (0, 10)


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


def test_a_last_line_that_went_on_is_no_growth(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    line = json.dumps(documents(1)[0])
    corpus.write_text(line)  # without an end of line
    build(source(corpus), Rows())
    corpus.write_text(line + "  \n" + json.dumps(documents(2)[1]))
    rows = Rows()
    build(source(corpus), rows)
    assert rows.asked == [(0, 2)]
    corpus.write_text(line + "\n" + json.dumps(documents(2)[1]))
    rows = Rows()
    build(source(corpus), rows)
    assert rows.asked == [(1, 2)]


@pytest.mark.parametrize("damage", ["byte", "short", "chunks"])
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


def test_vectors_of_another_index_are_told(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 34)
    folder = build(source(corpus), Rows()).folder
    negative = lambda documents: lambda start, stop: -Rows()(documents)(start, stop)  # noqa: E731
    other = build(source(corpus, settings={"encoder": "b"}), negative).folder
    for name in ("vectors.bin", "chunks.jsonl"):
        shutil.copyfile(other / name, folder / name)
    with pytest.raises(ValueError, match=r"chunks\.jsonl is not the file that was written"):
        build(source(corpus), Rows())
    # Nor does an index of a longer corpus go on from it.
    write_corpus(corpus, 40)
    rows = Rows()
    np.testing.assert_array_equal(build(source(corpus), rows).vectors, wanted(40))
    assert rows.asked[0] == (0, 10)


def test_a_corpus_that_changes_while_it_is_encoded_is_told(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 34)

    def changing(documents):
        write_corpus(corpus, 35)
        return Rows()(documents)

    with pytest.raises(ValueError, match="changed while it was indexed"):
        build(source(corpus), changing)
    built = build(source(corpus), Rows())
    np.testing.assert_array_equal(built.vectors, wanted(35))
    assert built.documents[34].id == "d34"


@pytest.mark.parametrize("name", ["offsets.npy", "checks.npy"])
@pytest.mark.parametrize("damage", ["short", "gone", "zeros"])
def test_a_damaged_file_of_lines_is_told(tmp_path, name, damage):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 34)
    built = build(source(corpus), Rows())
    whole = [built.documents[i] for i in range(34)]
    file = built.folder / name
    if damage == "zeros":
        content = np.load(file)
        np.save(file, np.zeros_like(content))
    elif damage == "short":
        os.truncate(file, 130)
    else:
        file.unlink()
    with pytest.raises(ValueError, match="the index is damaged; delete the folder"):
        build(source(corpus), Rows())
    shutil.rmtree(built.folder)
    again = build(source(corpus), Rows()).documents
    assert [again[i] for i in range(34)] == whole


def test_a_flipped_bit_of_an_index_is_told(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 34)
    built = build(source(corpus), Rows())
    whole = [built.documents[i] for i in range(34)]
    files_of = sorted(built.folder.iterdir())
    assert len(files_of) == 5
    rng, told = random.Random(0), []
    for turn in range(300):
        file = files_of[turn % 5]
        content = file.read_bytes()
        damaged, bit = bytearray(content), rng.randrange(8 * len(content))
        damaged[bit // 8] ^= 1 << bit % 8
        file.unlink()
        file.write_bytes(damaged)
        rows = Rows()
        try:
            again = build(source(corpus), rows)
        except ValueError as error:
            told.append(str(error))
        else:
            np.testing.assert_array_equal(again.vectors, wanted(34))
            assert [again.documents[i] for i in range(34)] == whole, (file.name, bit)
        assert rows.asked == []
        file.unlink()
        file.write_bytes(content)
    assert len(told) > 250
    assert [
        text for text in told if f"damaged; delete the folder {built.folder}," not in text
    ] == []


def test_a_damaged_earlier_index_is_no_reason_to_fail(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 10)
    manifest = build(source(corpus), Rows()).folder / "manifest.json"
    fields = json.loads(manifest.read_text())
    for damaged in (
        [1],
        fields | {"corpus": {}},
        fields | {"corpus": 3},
        fields | {"corpus": {"digest": "a", "bytes": "1"}},
    ):
        manifest.write_text(json.dumps(damaged))
        write_corpus(corpus, 11)
        rows = Rows()
        folder = build(source(corpus), rows).folder
        assert rows.asked == [(0, 10), (10, 11)]
        shutil.rmtree(folder)


def test_an_index_of_before_there_were_checksums_gets_them(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 34)
    folder = build(source(corpus), Rows()).folder
    manifest = folder / "manifest.json"
    whole = json.loads(manifest.read_text())
    assert set(whole["lines"]) == {"offsets.npy", "checks.npy", "chunks.jsonl"}
    earlier = {name: value for name, value in whole.items() if name != "lines"}
    manifest.write_text(json.dumps(earlier))
    rows = Rows()
    assert build(source(corpus), rows).documents[33].id == "d33"
    assert rows.asked == []
    assert json.loads(manifest.read_text()) == whole
    of_lines = {n: d for n, d in whole["lines"].items() if n != "chunks.jsonl"}
    manifest.write_text(json.dumps(earlier | {"lines": of_lines}))
    build(source(corpus), rows)
    assert rows.asked == []
    assert json.loads(manifest.read_text()) == whole
    # Nothing that is damaged gets a checksum: lines are compared with those of the corpus.
    manifest.write_text(json.dumps(earlier))
    offsets = np.load(folder / "offsets.npy")
    offsets[20] ^= 1 << 40
    np.save(folder / "offsets.npy", offsets)
    with pytest.raises(ValueError, match=r"offsets\.npy is not the file that was written"):
        build(source(corpus), Rows())
    assert json.loads(manifest.read_text()) == earlier


def test_a_corpus_that_changes_while_it_is_searched_answers_nothing_wrong(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 34)
    found = build(source(corpus), Rows()).documents
    whole = [found[i] for i in range(34)]
    with corpus.open("a") as file:  # which changes none of them
        file.write(json.dumps({"id": "d99", "title": "New", "text": "new"}) + "\n")
    assert [found[i] for i in range(34)] == whole
    text = corpus.read_text()
    with corpus.open("r+") as file:  # in place, and a character longer
        file.write(text.replace(whole[5].text, whole[5].text + "!", 1))
    assert [found[i] for i in range(5)] == whole[:5]
    for place in range(5, 34):
        with pytest.raises(ToolError, match="The file has changed since"):
            found[place]
    os.truncate(corpus, 10)
    with pytest.raises(ToolError, match="The file has changed since"):
        found[33]
    # Another file of that name is not what is open.
    other = write_corpus(tmp_path / "other.jsonl", 34)
    again = build(source(other), Rows()).documents
    assert again[0] == whole[0]  # from then on it is open
    os.replace(write_corpus(tmp_path / "third.jsonl", 3), other)
    assert [again[i] for i in (0, 33)] == [whole[0], whole[33]]


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


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (np.zeros((10, 2), np.float32), r"an array of \(10, 2\); expected finite numbers, \(10, 3"),
        (np.full((10, 3), np.inf, np.float32), "documents 0 to 10 are no finite numbers"),
    ],
)
def test_vectors_that_cannot_be_searched(tmp_path, found, message):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 10)
    with pytest.raises(ValueError, match=message):
        build(source(corpus), lambda _: lambda start, stop: found)


def test_a_full_disk_is_told_before_the_work(tmp_path):
    corpus, rows = write_corpus(tmp_path / "corpus.jsonl", 34), Rows()
    with (
        no_file_beyond(4000),
        pytest.raises(OSError, match="the vectors of 34 documents take 1 MiB"),
    ):
        build(source(corpus, width=10_000), rows)
    assert rows.asked == []


def test_a_corpus_that_is_malformed_is_refused(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    for text, message in (
        ("", "has no documents"),
        ('{"id": "1", "text": "x"}\n', 'corpus.jsonl:1: expected "id", "title" and "text"'),
        ('{"id": "1", "title": "a", "text": "x"}\n' * 2, "the id '1' is that of line 1"),
    ):
        corpus.write_text(text)
        with pytest.raises(ValueError, match=message):
            build(source(corpus), Rows())


def test_an_engines_build_is_resumed_too(tmp_path, monkeypatch, quick_compilation):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 25)
    told = []

    def kill(count):
        told.append(count)
        if count == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dense(corpus, progress=kill)
    resumed = dense(corpus, progress=told.append)
    assert told == [10, 20, 10, 20, 25]
    whole = dense(corpus, index=str(tmp_path / "other"))
    np.testing.assert_array_equal(resumed._passages.vectors, whole._passages.vectors)
