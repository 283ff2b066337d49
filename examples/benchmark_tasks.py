r"""Convert published question sets to tasks: NQ, TriviaQA, PopQA, HotpotQA and others.

python -m examples.benchmark_tasks --name=hotpotqa --in=hotpot_train_v1.1.json \
    --out=data/hotpotqa.jsonl

`BENCHMARKS` lists the names. The input is a published file, or a copy by FlashRAG or verl, in JSON,
JSONL, CSV, TSV or Parquet, or a folder or pattern of files. Each task has an `id` (name and
published id), a `data_source` (the name) and `answers`. A repeated question is written once, with
the answers of all copies. Rows that cannot be tasks are skipped and counted. The error for a
malformed row names its file and row number.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl.data.readers.base import Reader, SequenceReader, split_range
from jaxrl.data.records import parse_task
from jaxrl.data.tasks import TaskSource, normalize_question, open_reader
from jaxrl.envs.base import Task
from jaxrl.utils.files import open_atomic

Row = Mapping[str, Any]
Fields = dict[str, Any]


class SkippedRowError(ValueError):
    """Error for a row that cannot be a task. Rows are counted by the error message."""


def convert_nq_open(row: Row) -> Fields:
    """NQ-open: `question`, `answer` (a list)."""
    return {"question": row["question"], "answers": row["answer"]}


def convert_trivia_qa(row: Row) -> Fields:
    """TriviaQA: `Question`, `QuestionId`, `Answer` with `Value` and `Aliases`.

    Hugging Face's copy: the same in lower case, with `question_id`.
    """
    row = {name.lower().replace("_", ""): value for name, value in row.items()}
    answer = row.get("answer")
    if not answer:
        raise SkippedRowError("without answers, as in the test split")
    fields_by_name = {name.lower(): value for name, value in answer.items()}
    answers = [
        fields_by_name["value"],
        *(fields_by_name.get("aliases") or []),
        *(fields_by_name.get("humananswers") or []),
    ]
    return {"id": row["questionid"], "question": row["question"], "answers": answers}


def convert_pop_qa(row: Row) -> Fields:
    """PopQA: `id`, `question`, `possible_answers` (JSON in a cell of the TSV)."""
    answers = row["possible_answers"]
    answers = json.loads(answers) if isinstance(answers, str) else answers
    metadata = {name: row[name] for name in ("prop", "s_pop") if name in row}
    return {"id": row["id"], "question": row["question"], "answers": answers, "metadata": metadata}


def convert_multi_hop(row: Row) -> Fields:
    """HotpotQA and 2WikiMultiHopQA: `_id` (Hugging Face: `id`), `question`, `answer`, `type`."""
    if not row.get("answer"):
        raise SkippedRowError("without an answer, as in the test split")
    metadata = {name: row[name] for name in ("type", "level") if row.get(name)}
    return {
        "id": row.get("_id") or row["id"],
        "question": row["question"],
        "answers": [row["answer"]],
        "metadata": metadata,
    }


def convert_musique(row: Row) -> Fields:
    """MuSiQue: `id`, `question`, `answer`, `answer_aliases`; `answerable` is true."""
    if not row.get("answerable", True):
        raise SkippedRowError("unanswerable from its paragraphs")
    if not row.get("answer"):
        raise SkippedRowError("without an answer, as in the test split")
    hops = re.match(r"(\d)hop", str(row["id"]))
    return {
        "id": row["id"],
        "question": row["question"],
        "answers": [row["answer"], *(row.get("answer_aliases") or [])],
        "metadata": {"hops": int(hops[1])} if hops else {},
    }


def convert_bamboogle(row: Row) -> Fields:
    """Bamboogle: the columns `Question` and `Answer` of its table."""
    row = {name.lower(): value for name, value in row.items()}
    return {"question": row["question"], "answers": row["answer"]}


def convert_competition(row: Row) -> Fields:
    """AIME and MATH-500: `problem` (or `question`) and `answer`, in upper or lower case.

    Optional `id` or `unique_id`. Rows in verl's format, such as DAPO's AIME, are supported too.
    """
    if "reward_model" in row:
        return convert_verl_math(row)
    row = {name.lower(): value for name, value in row.items()}
    metadata = {name: row[name] for name in ("subject", "level", "year") if row.get(name)}
    id = row.get("unique_id", row.get("id"))
    return {
        **({"id": id} if id is not None else {}),
        "question": row.get("problem") or row["question"],
        "answers": row["answer"],
        "metadata": metadata,
    }


def convert_gsm8k(row: Row) -> Fields:
    """GSM8K: `question`, and `answer` that ends with `#### ` and a number; commas are dropped."""
    if "reward_model" in row:
        return convert_verl_math(row)
    _, mark, number = row["answer"].rpartition("####")
    if not mark:
        raise ValueError(f"'answer' is {row['answer'][-40:]!r}; expected '#### ' and a number.")
    return {"question": row["question"], "answers": [number.strip().replace(",", "")]}


def convert_verl_math(row: Row) -> Fields:
    """DAPO's dataset, in verl's format; the prompt asks for the line `Answer:`."""
    fields = {name: row[name] for name in ("prompt", "reward_model")}
    id = (row.get("extra_info") or {}).get("index")
    return fields | ({"id": id} if id is not None else {})


def convert_enigmata(row: Row) -> Fields:
    """Enigmata: `prompt`, `answer`, `task_name`; puzzles whose solution is one line of text."""
    if "reward_model" in row:
        return convert_verl_math(row)
    answer = row.get("answer")
    answer = "" if answer is None else str(answer).strip()
    if not answer or "\n" in answer:
        raise SkippedRowError("without a solution of one line")
    prompt = row.get("prompt") or row["question"]
    # The puzzles' verifiers need `meta`.
    metadata = {name: row[name] for name in ("task_name", "difficulty", "meta") if row.get(name)}
    key = "question" if isinstance(prompt, str) else "messages"
    return {key: prompt, "answers": [answer], "metadata": metadata}


def convert_tool_star(row: Row) -> Fields:
    """Tool-Star's Multi-Tool-RL-10K: `question`, `data_source`, `reward_model`; no mathematics."""
    kind = f"{row.get('ability')} {row['data_source']}".lower()
    if "math" in kind:
        raise SkippedRowError("of mathematics")
    truth = row["reward_model"]["ground_truth"]
    fields = {name: row[name] for name in ("question", "data_source")}
    return fields | {"answers": truth["target"] if isinstance(truth, dict) else truth}


BENCHMARKS: Mapping[str, Callable[[Row], Fields]] = {
    "nq": convert_nq_open,
    "triviaqa": convert_trivia_qa,
    "popqa": convert_pop_qa,
    "hotpotqa": convert_multi_hop,
    "2wiki": convert_multi_hop,
    "musique": convert_musique,
    "bamboogle": convert_bamboogle,
    "aime": convert_competition,
    "math500": convert_competition,
    "gsm8k": convert_gsm8k,
    "dapo": convert_verl_math,
    "enigmata": convert_enigmata,
    "tool_star": convert_tool_star,
}
"""Functions that convert a published row to task fields, by benchmark name."""


def convert_flash_rag(row: Row) -> Fields:
    """FlashRAG's question sets: `id`, `question`, `golden_answers`; Search-R1: `data_source`."""
    fields = {name: row[name] for name in ("id", "question", "data_source") if name in row}
    return fields | {"answers": row["golden_answers"]}


def read_rows(source: str) -> Iterator[tuple[Row, str]]:
    """Yield the rows of a published file with their locations.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file cannot be read.
    """
    reader = _open_reader(source)
    for block in split_range(len(reader), 1000):
        yield from zip(reader.read(block), map(reader.location, block), strict=True)


def _open_reader(source: str) -> Reader:
    if Path(source).suffix == ".json":
        # An array, or an object with the array in `Data` (TriviaQA). It fits in memory.
        with open(source, encoding="utf-8") as file:
            content = json.load(file)
        rows = content.get("Data", content.get("data")) if isinstance(content, dict) else content
        if not isinstance(rows, list):
            raise ValueError(
                f"{source} contains no array; expected an array, or an object with 'Data'."
            )
        return SequenceReader(rows, source, "--in")
    return open_reader(TaskSource(key="--in", source=source))


@dataclass(kw_only=True)
class DeduplicatedTasks:
    """Deduplicated tasks in order of first occurrence, with the answers of all copies."""

    tasks: dict[str, Fields] = field(default_factory=dict)  # tasks by normalized question
    skip_counts: Counter[str] = field(default_factory=Counter)  # number of skipped rows by reason
    ids: set[str] = field(default_factory=set)

    def add(self, task: Task, published_id: str, data_source: str) -> None:
        """Add a task with its published id, or merge its answers into an equal question."""
        chat = json.dumps(task.messages)
        key = chat if task.question is None else normalize_question(task.question)
        if key not in self.tasks:
            self.tasks[key] = self._make_fields(task, published_id, data_source)
            return
        answers = self.tasks[key]["answers"]
        new_answers = [answer for answer in task.answers if answer not in answers]
        answers += new_answers
        kind = "with further answers, which were added" if new_answers else "with the same answers"
        self.skip_counts[f"copies of questions, {kind}"] += 1

    def _make_fields(self, task: Task, published_id: str, data_source: str) -> Fields:
        id = f"{data_source}_{published_id}"
        while id in self.ids:
            id += "+"
        self.ids.add(id)
        fields: Fields = {"id": id, "data_source": data_source}
        if task.question is None:
            fields["messages"] = list(task.messages or ())
        else:
            fields["question"] = task.question
        fields["answers"] = list(dict.fromkeys(task.answers))
        metadata = {k: v for k, v in task.metadata.items() if k != "reward_model"}
        return fields | ({"metadata": metadata} if metadata else {})


def convert_tasks(name: str, source: str, data_source: str = "") -> DeduplicatedTasks:
    """Convert the rows of a published file to tasks.

    Args:
        name: Name in `BENCHMARKS`.
        source: File, pattern or folder.
        data_source: Data source of the tasks and prefix of their ids; "" for that of each row, or
            else `name`.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file cannot be read, or a row is malformed. The message gives its location.
    """
    tasks_by_question = DeduplicatedTasks()
    for number, (row, location) in enumerate(read_rows(source)):
        convert = convert_flash_rag if "golden_answers" in row else BENCHMARKS[name]
        try:
            fields = convert(row)
            task = parse_task(fields, location)
        except SkippedRowError as error:
            tasks_by_question.skip_counts[str(error)] += 1
            continue
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{location} is not a row of {name}: {error!r}; it has {', '.join(row)}; expected "
                f"{' '.join((convert.__doc__ or '').split())}"
            ) from error
        except ValueError as error:
            raise ValueError(f"{location}: {str(error).removeprefix(f'{location}: ')}") from error
        published_id = task.id if fields.get("id") is not None else str(number)
        row_source = data_source or fields.get("data_source") or name
        tasks_by_question.add(task, published_id, row_source)
    return tasks_by_question


def main(argv: Sequence[str] | None = None) -> None:
    """Convert the file given on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", required=True, choices=BENCHMARKS, help="name of the benchmark")
    parser.add_argument("--in", required=True, dest="source", help="published file")
    parser.add_argument("--out", required=True, help="JSONL of tasks to write")
    parser.add_argument(
        "--data_source", default="", help="data source of the tasks (default: the name)"
    )
    parser.add_argument("--limit", type=int, default=0, help="number of tasks to write; 0: all")
    settings = parser.parse_args(argv)
    try:
        tasks_by_question = convert_tasks(settings.name, settings.source, settings.data_source)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    tasks = list(tasks_by_question.tasks.values())[: settings.limit or None]
    if not tasks:
        parser.error(f"{settings.source} contains no tasks; {dict(tasks_by_question.skip_counts)}")
    out = Path(settings.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with open_atomic(out) as file:
        file.writelines(json.dumps(task, ensure_ascii=False) + "\n" for task in tasks)
    print(f"{out}: {len(tasks):,} tasks")
    for reason, count in tasks_by_question.skip_counts.items():
        print(f"  skipped: {count:,} {reason}")


if __name__ == "__main__":
    main()
