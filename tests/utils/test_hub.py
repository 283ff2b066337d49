"""Downloads from a server that stands in for the Hugging Face Hub."""

import subprocess
import sys

import pytest
from huggingface_hub import constants, file_download

from jaxrl.utils.hub import download_hub_files, download_model, parse_hub_name

WEIGHTS = bytes(range(256)) * 1000
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "merges.txt": b"a b"}


def download_data(name):
    return download_hub_files(parse_hub_name(name, "tasks"), "tasks")[0]


def test_only_the_files_that_a_run_reads_are_downloaded(hub):
    unused = dict.fromkeys(("pytorch_model.bin", "q4.gguf", "onnx/model.onnx", "README.md"), b"x")
    nested = {"1_Pooling/config.json": b"{}", "tokenizer.json": b"{}", "chat_template.jinja": b""}
    hub.push("models/org/pocket", {**FILES, **nested, **unused, "consolidated.safetensors": b"x"})
    folder = download_model("hf://org/pocket", "model.path")
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {*FILES, *nested}
    num_downloads = len(hub.downloads)
    assert download_model("hf://org/pocket", "model.path") == folder
    assert len(hub.downloads) == num_downloads  # the second time, all is in the cache


def test_a_cut_download_continues_where_it_was_cut(hub, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)
    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    hub.push("models/org/pocket", FILES)
    hub.cuts["model.safetensors"] = [100_000, 50_000]
    folder = download_model("hf://org/pocket", "model.path")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    starts = [start for path, start in hub.downloads if path == "model.safetensors"]
    assert starts == [0, 100_000, 150_000]
    # The client gives up after five attempts without progress. The next start fetches this file.
    hub.push("models/org/other", {"model.safetensors": WEIGHTS[::-1]})
    hub.cuts["model.safetensors"] = [200_000, *[0] * 5]
    with pytest.raises(
        ConnectionError, match=r"^model\.path is [^\n]* cannot be downloaded[^\n]*$"
    ):
        download_model("hf://org/other", "model.path")
    folder = download_model("hf://org/other", "model.path")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS[::-1]


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub):
    old = hub.push("models/org/pocket", FILES)
    new = hub.push("models/org/pocket", {**FILES, "config.json": b"[]"})
    commits = {"": new, "@main": new, "@v1": old, f"@{old}": old}
    for revision, commit in commits.items():
        assert download_model(f"hf://org/pocket{revision}", "model.path").name == commit


def test_a_data_file_or_pattern_is_downloaded(hub):
    files = {f"data/train-{i}.parquet": b"%d" % i for i in range(2)}
    commit = hub.push("datasets/org/sums", {**files, "data/test-0.parquet": b"x", "README.md": b""})
    path = download_data("hf://datasets/org/sums@v1/data/train-1.parquet")
    assert path.read_bytes() == b"1"
    pattern = download_data("hf://datasets/org/sums/data/train-*.parquet")
    assert pattern.parents[1].name == commit
    assert [file.read_bytes() for file in sorted(pattern.parent.glob(pattern.name))] == [b"0", b"1"]
    assert not (pattern.parent / "test-0.parquet").exists()


def test_each_problem_is_an_error_of_one_line(hub, monkeypatch):
    hub.push("models/org/pocket", FILES)
    hub.push("models/org/gated", FILES)
    hub.push("datasets/org/sums", {"train.parquet": b""})
    hub.gated.add("models/org/gated")
    names = {
        "hf://pocket": "expected hf://org/name",
        "hf://org/pocket/config.json": "expected hf://org/name",
        "hf://spaces/org/pocket": "expected hf://org/name",
        "hf://org/missing": "cannot be downloaded.*org/missing",
        "hf://org/gated": "cannot be downloaded.*org/gated",
        "hf://org/pocket@v9": "cannot be downloaded.*v9",
    }
    for name, message in names.items():
        with pytest.raises((ValueError, OSError), match=rf"^--model is '{name}'.*{message}[^\n]*$"):
            download_model(name, "--model")
    with pytest.raises(FileNotFoundError, match="has no file"):
        download_data("hf://datasets/org/sums/test.parquet")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match=r"^--model is .* cannot be downloaded[^\n]*$"):
        download_model("hf://org/pocket", "--model")


def test_processes_share_the_cache_and_work_without_a_network(hub):
    hub.push("models/org/pocket", FILES)
    program = "from jaxrl.utils.hub import download_model as d; print(d('hf://org/pocket', 'x'))"
    command = [sys.executable, "-c", program]
    processes = [subprocess.Popen(command, stdout=-1, text=True) for _ in range(2)]
    [folder, other] = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert folder == other
    assert [path for path, _ in hub.downloads].count("model.safetensors") == 1
    hub.close()
    offline = subprocess.run(["env", "HF_HUB_OFFLINE=1", *command], stdout=-1, text=True)
    assert offline.stdout.strip() == folder
