"""Data sets with the columns of the published ones, from a server that stands in for the hub."""

import gzip
import importlib
import io
import json
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from examples import prepare_data
from jaxrl.data.tasks import open_tasks, resolve_sources
from jaxrl.envs.search.corpus import read_corpus
from tests.published import AIME, DAPO, FLASH_RAG


def parquet(*rows):
    pq.write_table(pa.Table.from_pylist(list(rows)), buffer := io.BytesIO())
    return buffer.getvalue()


def jsonl(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def picture():
    Image.new("RGB", (4, 4)).save(buffer := io.BytesIO(), "PNG")
    return buffer.getvalue()


def archive(files):
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as file:
        for name, content in files.items():
            file.writestr(name, content)
    return buffer.getvalue()


def search_r1(split, source, question, *answers):
    return {
        "id": f"{split}_0", "question": question, "golden_answers": list(answers),
        "data_source": source, "prompt": [{"role": "user", "content": f"Answer. {question}"}],
        "ability": "fact-reasoning", "extra_info": {"index": 0, "split": split},
        "reward_model": {"ground_truth": {"target": list(answers)}, "style": "rule"},
    }  # fmt: skip


def tool_star(source, ability, question, *answers):
    return {
        "data_source": source, "question": question, "ability": ability,
        "reward_model": {"ground_truth": {"target": list(answers)}, "style": "rule"},
        "extra_info": {"index": 0, "split": "train"},
    }  # fmt: skip


def virl(qid, question, answer, *images):
    return {
        "qid": qid, "question": question, "answer": answer, "image": list(images),
        "category": "GradeSchool Geometric", "source": "Processed", "PassRate_32BTrained": 0.5,
        "PassRate_7BBase": 0.2,
    }  # fmt: skip


def puzzle(question, answer, task="maze"):
    return {"prompt": question, "answer": answer, "task_name": task, "meta": '{"id": 1}'}


REPOSITORIES = {
    "PeterJinGo/nq_hotpotqa_train": {
        "train.parquet": parquet(
            search_r1("train", "nq", "Who wrote Emma?", "Jane Austen"),
            search_r1("train", "hotpotqa", "Which is older?", "Emma", "the novel"),
        ),
        "test.parquet": parquet(search_r1("test", "popqa", "Where is Avington?", "Hampshire")),
    },
    "PeterJinGo/wiki-18-corpus": {
        "wiki-18.jsonl.gz": gzip.compress(jsonl({"id": "0", "contents": '"Emma"\nA novel.'}))
    },
    "BytedTsinghua-SIA/DAPO-Math-17k": {"data/dapo-math-17k.parquet": parquet(DAPO, DAPO)},
    "BytedTsinghua-SIA/AIME-2024": {"data/aime-2024.parquet": parquet(AIME)},
    "dongguanting/Multi-Tool-RL-10K": {
        "grpo_mix_train.parquet": parquet(
            tool_star("hotpotqa", "qa", "Who wrote Emma?", "Jane Austen"),
            tool_star("numina", "MATH", "What is 6*7?", "42"),
        )
    },
    "RUC-NLPIR/FlashRAG_datasets": {
        **{
            f"{name}.jsonl": jsonl({**FLASH_RAG, "metadata": {"type": "bridge"}})
            for name in ("hotpotqa/dev", "2wikimultihopqa/dev", "bamboogle/test")
        },
        "musique/dev.jsonl": jsonl(
            *({**FLASH_RAG, "id": i, "question": f"{i}?"} for i in range(201))
        ),
    },
    "TIGER-Lab/ViRL39K": {
        "images.zip": archive({"images/a-0.png": picture()}),
        "39Krelease.parquet": parquet(
            virl("a", "<image>How long is AB?", "\\boxed{\\frac{1}{2}}", "images/a-0.png"),
            virl("b", "What is 6*7?", "\\boxed{42}"),
            virl("c", "What is it?", "unknown"),
            virl("d", "<image><image>What is it?", "\\boxed{1}", "images/a-0.png"),
        ),
    },
    "BytedTsinghua-SIA/Enigmata-Data": {
        "maze/en/train.jsonl": jsonl(puzzle("Find a way.", "LRL"), puzzle("Fill.", [[1, 2], [3]])),
        "sudoku/en/train.jsonl": jsonl(puzzle("Fill all.", "1\n2", "sudoku")),
        "maze/zh/train.jsonl": jsonl(puzzle("走", "L")),
    },
    "BytedTsinghua-SIA/Enigmata-Eval": {"data/eval.parquet": parquet(puzzle("Turn.", "R"))},
}

EXPECTED = {
    ("search_r1", "nq_hotpotqa"): [
        ("train", "nq_train_0", "nq", ("Jane Austen",)),
        ("train", "hotpotqa_train_0", "hotpotqa", ("Emma", "the novel")),
        ("eval", "popqa_test_0", "popqa", ("Hampshire",)),
    ],
    ("dapo", "dapo_math"): [
        ("train", f"dapo_{DAPO['extra_info']['index']}", "dapo", ("42",)),
        ("eval", "aime24_0", "aime24", ("42",)),
    ],
    ("bapo", "bapo"): [
        ("train", "hotpotqa_0", "hotpotqa", ("Jane Austen",)),
        ("eval", "hotpotqa_dev_0", "hotpotqa", ("Jane Austen",)),
        ("eval", "2wiki_dev_0", "2wiki", ("Jane Austen",)),
        *(("eval", f"musique_{i}", "musique", ("Jane Austen",)) for i in range(200)),
        ("eval", "bamboogle_dev_0", "bamboogle", ("Jane Austen",)),
    ],
    ("passk", "enigmata"): [
        ("train", "enigmata/maze_0", "enigmata/maze", ("LRL",)),
        ("train", "enigmata/maze_1", "enigmata/maze", ("[[1, 2], [3]]",)),
        ("eval", "enigmata_0", "enigmata", ("R",)),
    ],
}


@pytest.fixture
def prepare(hub, tmp_path, monkeypatch):
    """Return a function that prepares a data set, and reads the tasks of a configuration."""
    for repo, files in REPOSITORIES.items():
        hub.push(f"datasets/{repo}", files)
    monkeypatch.chdir(tmp_path)

    def run(config_name, name):
        prepare_data.main([name, f"--out=data/{name}"])
        config = importlib.import_module(f"configs.{config_name}").get_config()
        return config, [
            (kind, task)
            for kind in ("train", "eval")
            for task in open_tasks(resolve_sources(config, kind))
        ]

    return run


@pytest.mark.parametrize(("config_name", "name"), EXPECTED)
def test_a_configuration_reads_what_its_command_writes(prepare, config_name, name):
    _, tasks = prepare(config_name, name)
    found = [(kind, task.id, task.data_source, task.answers) for kind, task in tasks]
    assert found == EXPECTED[config_name, name]


def test_problems_with_images_are_written_with_them(prepare, capsys):
    _, tasks = prepare("ares", "ares")
    by_id = {task.id: task for _, task in tasks}
    assert {kind for kind, _ in tasks} == {"train", "eval"}  # one of the two is held out
    assert by_id["virl39k_a"].answers == ("\\frac{1}{2}",)
    assert by_id["virl39k_a"].images[0].read() == picture()
    assert (by_id["virl39k_b"].answers, by_id["virl39k_b"].images) == (("42",), ())
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "skipped" in line] == [
        "  skipped: 1 without a solution of one line",
        "  skipped: 1 with images that do not match the text",
    ]


def test_documents_are_unpacked(prepare, hub, tmp_path):
    prepare("search_r1", "nq_hotpotqa")
    config, _ = prepare("search_r1", "wiki18")
    [document] = read_corpus(Path(config.search.dense.corpus))
    assert (document.title, document.text) == ("Emma", "A novel.")
    hub.push("datasets/PeterJinGo/wiki-18-corpus", {"README.md": b""})
    with pytest.raises(SystemExit):
        prepare_data.main(["wiki18", f"--out={tmp_path}"])


def test_without_a_name_all_data_sets_are_listed(capsys):
    prepare_data.main([])
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [*prepare_data.SIZES]
    assert {*names} == {*prepare_data.FILES, *prepare_data.WRITERS}
