"""A user's retriever, Parquet files and reward in one run, by the commands of docs/extending.md."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers import blocks, text
from tests.runs import free_port, records, trajectories

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "extending.md"

pytestmark = pytest.mark.minutes


def commands(start):
    """The lines of the document's shell blocks that begin so, as arguments."""
    lines = "".join(blocks(DOCUMENT, "sh")).splitlines()
    program = [sys.executable, *([] if start.startswith("python") else ["-m", "jaxrl.cli"])]
    return [[*program, *shlex.split(line)[1:]] for line in lines if line.startswith(start)]


def write_verl(path, questions):
    """Questions as Search-R1 prepares them for verl."""
    rows = [
        {
            "data_source": "people",
            "prompt": [{"role": "user", "content": question["question"]}],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": question["answers"]}},
            "extra_info": {"split": path.stem, "index": index},
        }
        for index, question in enumerate(questions)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture
def folder(tmp_path, tiny_world):
    """What a user has, the port aside."""
    shutil.copytree(tiny_world / "model", tmp_path / "model")
    shutil.copy(tiny_world / "corpus.jsonl", tmp_path)
    for name, source in (("train", "questions_train"), ("test", "questions_eval")):
        lines = (tiny_world / f"{source}.jsonl").read_text().splitlines()
        write_verl(tmp_path / f"{name}.parquet", [json.loads(line) for line in lines[:24]])
    shutil.copy(HERE / "my_score.py", tmp_path)
    return tmp_path


@pytest.fixture
def retriever(folder):
    """The document's server, on a port that is free, which the configuration then names."""
    port = str(free_port())
    (folder / "my_run.py").write_text(text(HERE / "my_run.py").replace("8000", port))
    (serve,) = (c for c in commands("python -m examples.serve_retriever") if len(c) == 5)
    serve[-1] = serve[-1].replace("8000", port)
    server = subprocess.Popen(serve, cwd=folder, env=environment(), stdout=subprocess.PIPE)
    server.stdout.readline()  # once it listens
    yield
    server.terminate()
    server.wait(20)


def environment():
    root = str(HERE.parents[1])
    return os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}


def test_the_document_shows_the_files():
    shown = blocks(DOCUMENT, "python")
    assert text(HERE / "my_score.py") in shown
    assert text(HERE / "my_run.py") in shown


def test_three_steps_with_ones_own_retriever_data_and_reward(folder, retriever, quick_compilation):
    done = [
        subprocess.run(
            command,
            cwd=folder,
            env=environment() | quick_compilation,
            capture_output=True,
            text=True,
            timeout=300,
        )
        for start in ("jaxrl plan --config=my_run.py", "python -m jaxrl.launch --config=my_run.py")
        for command in commands(start)
    ]
    assert [run.returncode for run in done] == [0, 0], [run.stderr[-2000:] for run in done]
    steps = [r for r in records(folder / "runs" / "mine") if "critic/rewards/mean" in r]
    assert len(steps) == 3
    played = [t for step in (1, 2, 3) for t in trajectories(folder / "runs" / "mine", step)]
    assert len(played) == 48
    assert all(t["outcome"] != "environment_error" for t in played)
    assert {t["reward"] for t in played} <= {0.0, 0.1, 1.0}
    assert all(t["reward"] == t["reward_parts"]["compute_score"] for t in played)
