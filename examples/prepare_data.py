"""Download the data sets of the published configurations and convert them to task files.

python -m examples.prepare_data dapo_math --out=data/dapo_math    (without a name: lists them)

Files come from the Hugging Face Hub into its cache (`HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT`). Rows are
converted as in `examples/benchmark_tasks.py`. Rows that cannot be tasks are skipped and counted.
"""

from __future__ import annotations

import argparse
import fnmatch
import gzip
import json
import random
import shutil
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.benchmark_tasks import Fields, Row, SkippedRowError, convert_tasks, read_rows
from jaxrl.data.records import parse_task
from jaxrl.envs.rewards.rules import extract_last_boxed
from jaxrl.utils.files import atomic_write, open_atomic
from jaxrl.utils.hub import download_hub_files, parse_hub_name

NUM_HELD_OUT = 500  # tasks of a data set without a test split


@dataclass(frozen=True)
class Source:
    """Files of a repository, and the entry of `BENCHMARKS` that converts them."""

    repo: str
    files: str  # path, or pattern of several
    benchmark: str = ""
    data_source: str = ""  # "": that of each row, or else the benchmark; {task}: a puzzle's folder
    limit: int | None = None  # number of tasks to write


def fetch_files(repo: str, pattern: str) -> list[Path]:
    """Download the files that match a pattern, print their commit, and return their paths."""
    path, uri = download_hub_files(
        parse_hub_name(f"hf://datasets/{repo}/{pattern}", "NAME"), "NAME"
    )
    folder = path.parents[len(Path(pattern).parts) - 1]
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and fnmatch.fnmatch(file.relative_to(folder).as_posix(), pattern)
    )
    if not files:
        raise FileNotFoundError(f"{repo} has no file {pattern!r}; the repository has changed.")
    print(f"{repo}@{uri.revision}: {len(files)} files")
    return files


def write_tasks(path: Path, tasks: Sequence[Fields], skip_counts: Mapping[str, int]) -> None:
    """Write tasks as JSONL, and print their number and the number of skipped rows."""
    with open_atomic(path) as file:
        file.writelines(json.dumps(task, ensure_ascii=False) + "\n" for task in tasks)
    print(f"{path}: {len(tasks):,} tasks")
    for reason, count in skip_counts.items():
        print(f"  skipped: {count:,} {reason}")


def write_sources(out: Path, sources: Iterable[Source]) -> None:
    """Convert the rows of all sources, and write them to one file."""
    tasks: list[Fields] = []
    skip_counts: Counter[str] = Counter()
    for source in sources:
        for file in fetch_files(source.repo, source.files):
            name = source.data_source.format(task=file.parents[1].name)
            converted = convert_tasks(source.benchmark, str(file), name)
            tasks += list(converted.tasks.values())[: source.limit]
            skip_counts += converted.skip_counts
    write_tasks(out, tasks, skip_counts)


def convert_virl(row: Row) -> Fields:
    """ViRL39K: `qid`, `question`, `answer` in a box, `image` (paths), `category`, `source`."""
    answer = extract_last_boxed(row["answer"])
    if not answer or "\n" in answer:
        raise SkippedRowError("without a solution of one line")
    return {
        "id": f"virl39k_{row['qid']}",
        "data_source": "virl39k",
        "question": row["question"],
        "answers": [answer],
        **({"images": list(row["image"])} if row["image"] else {}),
        "metadata": {"category": row["category"], "source": row["source"]},
    }


def write_virl(out: Path) -> None:
    """Write ViRL39K with its images. Some tasks are held out, because it has no test split."""
    [archive] = fetch_files("TIGER-Lab/ViRL39K", "images.zip")
    [rows] = fetch_files("TIGER-Lab/ViRL39K", "39Krelease.parquet")
    with zipfile.ZipFile(archive) as file:
        file.extractall(out)
    tasks: list[Fields] = []
    skip_counts: Counter[str] = Counter()
    for row, location in read_rows(str(rows)):
        try:
            fields = convert_virl(row)
            parse_task(fields, location, folder=out)
        except SkippedRowError as error:
            skip_counts[str(error)] += 1
        except ValueError:
            skip_counts["with images that do not match the text"] += 1
        else:
            tasks.append(fields)
    held_out = {*random.Random(0).sample(range(len(tasks)), min(NUM_HELD_OUT, len(tasks) // 2))}
    split = [[t for i, t in enumerate(tasks) if (i in held_out) == flag] for flag in (False, True)]
    write_tasks(out / "train.jsonl", split[0], skip_counts)
    write_tasks(out / "test.jsonl", split[1], {})


def write_wiki18(out: Path) -> None:
    """Unpack Wikipedia 2018 in passages of 100 words."""
    [packed] = fetch_files("PeterJinGo/wiki-18-corpus", "wiki-18.jsonl.gz")
    with (
        gzip.open(packed) as source,
        atomic_write(out / "corpus.jsonl") as unfinished,
        open(unfinished, "wb") as target,
    ):
        shutil.copyfileobj(source, target, 2**24)
    print(out / "corpus.jsonl")


FLASH_RAG, ENIGMATA = "RUC-NLPIR/FlashRAG_datasets", "BytedTsinghua-SIA/Enigmata"
FILES: Mapping[str, Mapping[str, Sequence[Source]]] = {
    "nq_hotpotqa": {
        f"{split}.jsonl": [Source("PeterJinGo/nq_hotpotqa_train", f"{split}.parquet", "nq")]
        for split in ("train", "test")
    },
    "dapo_math": {
        "train.jsonl": [
            Source("BytedTsinghua-SIA/DAPO-Math-17k", "data/dapo-math-17k.parquet", "dapo")
        ],
        "aime24.jsonl": [
            Source("BytedTsinghua-SIA/AIME-2024", "data/aime-2024.parquet", "aime", "aime24")
        ],
    },
    "bapo": {
        "train.jsonl": [Source("dongguanting/Multi-Tool-RL-10K", "*.parquet", "tool_star")],
        "eval.jsonl": [
            Source(FLASH_RAG, "hotpotqa/dev.jsonl", "hotpotqa", limit=200),
            Source(FLASH_RAG, "2wikimultihopqa/dev.jsonl", "2wiki", limit=200),
            Source(FLASH_RAG, "musique/dev.jsonl", "musique", limit=200),
            Source(FLASH_RAG, "bamboogle/test.jsonl", "bamboogle", limit=200),
        ],
    },
    "enigmata": {
        "train.jsonl": [
            Source(f"{ENIGMATA}-Data", "*/en/train.jsonl", "enigmata", "enigmata/{task}")
        ],
        "test.jsonl": [Source(f"{ENIGMATA}-Eval", "*.parquet", "enigmata")],
    },
}
"""Sources by data set and output file."""

WRITERS: Mapping[str, Callable[[Path], None]] = {"ares": write_virl, "wiki18": write_wiki18}

SIZES = {
    "nq_hotpotqa": "Search-R1, PeterJinGo/nq_hotpotqa_train: 169,615 and 51,713 questions",
    "wiki18": "its documents, PeterJinGo/wiki-18-corpus: 21,015,324 passages, 14 GB",
    "dapo_math": "DAPO, BytedTsinghua-SIA/DAPO-Math-17k and AIME-2024: 17,398 and 30 problems",
    "bapo": "BAPO, dongguanting/Multi-Tool-RL-10K and RUC-NLPIR/FlashRAG_datasets: 5,000 and 725 "
    "questions",
    "ares": "ARES, TIGER-Lab/ViRL39K: 38,870 problems with images",
    "enigmata": f"Pass@k, {ENIGMATA}-Data and -Eval: 217,541 and 4,758 puzzles, before selection",
}
"""Method, source and published size of each data set."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare the data set named on the command line, or list all data sets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=SIZES, metavar="NAME", help=", ".join(SIZES))
    parser.add_argument("--out", type=Path, help="output folder; default: data/NAME")
    settings = parser.parse_args(argv)
    if settings.name is None:
        print("\n".join(f"{name:<12} {text}" for name, text in SIZES.items()))
        print(
            "Sizes are those that the sources report. No download from the Hub has been tested.",
            file=sys.stderr,
        )
        return
    out = settings.out or Path("data") / settings.name
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file, sources in FILES.get(settings.name, {}).items():
            write_sources(out / file, sources)
        if write := WRITERS.get(settings.name):
            write(out)
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
