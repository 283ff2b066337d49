"""Answers to what the page asks, as plain values; `server.py` sends them."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.config.schema import flat_json
from jaxrl.extras.view.curves import DEFAULTS, Curves
from jaxrl.extras.view.evaluations import Evaluations
from jaxrl.extras.view.index import COLUMNS, CORRECT, Filter, Table, TrajectoryIndex, cache_of
from jaxrl.extras.view.tokens import Tokens, Vocabulary, quantities
from jaxrl.extras.view.values import damaged_text
from jaxrl.utils.json_io import number_of

POLL_S = 1.0
"""Seconds between two looks at the files of the runs."""

PAGE_ROWS = 50
"""Trajectories of a page of the list."""

MAX_ROWS = 400
"""Most questions of a list, and trajectories of one question in one run, that are shown."""

SORTS = {"step": "step", "reward": "reward", "advantage": "advantage", "length": "tokens"}
"""Columns by which the list is sorted."""

WRITTEN = ("metrics.jsonl", "config.json", "trajectories", "eval")
"""Files and folders of which a run has at least one."""


class Run:
    """Everything that is known of one run's files.

    Attributes:
        workdir: of the run.
        name: shown; different for each run.
    """

    def __init__(self, workdir: Path, name: str, cache: Path | None):
        """Reads nothing yet.

        Args:
            workdir: of the run.
            name: shown.
            cache: file that keeps the index; None for nowhere.
        """
        self.workdir, self.name = workdir, name
        self.index = TrajectoryIndex(workdir / "trajectories", cache)
        self.curves = Curves(workdir)
        self.evaluations = Evaluations(workdir / "eval")
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()

    @property
    def config(self) -> dict[str, Any]:
        """The configuration, flat; empty where there is none that can be read."""
        try:
            return flat_json(self.workdir / "config.json")
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer's vocabulary; looked for again as long as there is none."""
        with self._lock:
            if self._vocabulary is None or not self._vocabulary.bytes:
                self._vocabulary = Vocabulary.of(self.workdir, self.config)
            return self._vocabulary

    @property
    def problems(self) -> list[str]:
        """Texts about files and lines that could not be read."""
        damaged = self.index.table.num_damaged
        problems = [*self.curves.problems, *self.evaluations.problems, *self.index.problems]
        return problems + ([damaged_text(damaged, "trajectories/")] if damaged else [])


def open_runs(workdirs: Iterable[Path], *, is_kept: bool = True) -> list[Run]:
    """Runs with different names; one that is named twice counts once.

    Args:
        workdirs: of the runs.
        is_kept: keep their indices in the user's cache.

    Raises:
        FileNotFoundError: a folder does not exist, or is no run's.
    """
    folders: dict[Path, Path] = {}
    for workdir in workdirs:
        if not workdir.is_dir():
            raise FileNotFoundError(
                f"there is no run {workdir}; expected a folder given as --workdir."
            )
        if not any((workdir / name).exists() for name in WRITTEN):
            raise FileNotFoundError(
                f"{workdir} is no run: it holds none of {', '.join(WRITTEN)}. Name a run's workdir."
            )
        folders.setdefault(workdir.resolve(), workdir)
    # The end of each path, as long as it takes to tell it from the others.
    for length in range(1, max((len(path.parts) for path in folders), default=1) + 1):
        names = ["/".join(path.parts[-length:]) for path in folders]
        if len(set(names)) == len(names):
            break
    return [
        Run(workdir, name, cache_of(workdir) if is_kept else None)
        for workdir, name in zip(folders.values(), names, strict=True)
    ]


class Pages:
    """Answers about some runs, whose files threads of it follow.

    Each public method that answers the page takes plain values and returns some. They raise
    `LookupError` for what is not there and `ValueError` for what cannot be read.
    """

    def __init__(self, runs: Sequence[Run]):
        """Answers about `runs`, which are read from `follow` on."""
        self.runs = runs
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._tasks: dict[str, str] = {}  # by key
        self._failures: dict[str, str] = {}  # of threads

    def follow(self) -> None:
        """Begins to read the files, and to look for changes until `close`."""
        for refresh in (self.refresh_curves, self.refresh_index):
            thread = threading.Thread(target=self._repeat, args=(refresh,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Ends the threads."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, refresh: Callable[[], None]) -> None:
        name = refresh.__name__
        while not self._stop.is_set():
            try:
                refresh()
                self._failures.pop(name, None)
            except Exception as error:  # a file with something in it that nobody thought of
                self._failures[name] = f"{name} failed and is tried again: {error!r}"
            self._stop.wait(POLL_S)

    def refresh_curves(self) -> None:
        """Reads what is new of metrics and evaluations."""
        for run in self.runs:
            run.curves.refresh()
        for run in self.runs:
            run.evaluations.refresh()

    def refresh_index(self) -> None:
        """Indexes new files of trajectories."""
        for run in self.runs:
            run.index.refresh(self._stop.is_set)

    def state(self) -> dict[str, Any]:
        """State of each run: what is written, how far it is indexed, what is wrong."""
        return {
            "runs": [
                {
                    "name": run.name,
                    "folder": str(run.workdir.resolve()),
                    "generation": run.curves.generation,
                    "records": len(run.curves.steps),
                    "step": run.curves.steps[-1] if len(run.curves.steps) else None,
                    "stage": run.curves.stages[-1] if run.curves.stages else "",
                    "files": run.index.num_files,
                    "indexed": run.index.num_indexed,
                    "trajectories": len(run.index.table),
                    "indexing_s": run.index.indexing_s,
                    "answers": sum(map(len, run.evaluations.answers.values())),
                    "problems": run.problems,
                }
                for run in self.runs
            ],
            "failures": list(self._failures.values()),
        }

    def metrics(self) -> dict[str, Any]:
        """Names of metrics, those that are shown by default, and the marks of each run."""
        names = sorted({name for run in self.runs for name in run.curves.names()})
        known = set(names)
        return {
            "names": names,
            "defaults": [name for name in DEFAULTS if name in known],
            "marks": [run.curves.shown_marks() for run in self.runs],
        }

    def series(self, names: Sequence[str], since: Mapping[int, tuple[int, int]]) -> dict[str, Any]:
        """Points of metrics of each run.

        Args:
            names: of the metrics.
            since: by run, a generation and the number of records that the page has of it already;
                points of these are left out.
        """
        return {
            "runs": [
                run.curves.since(names, *since.get(number, (-1, 0)))
                for number, run in enumerate(self.runs)
            ]
        }

    def trajectories(
        self,
        wanted: Filter,
        *,
        runs: Sequence[int] = (),
        sort: str = "step",
        is_descending: bool = True,
        page: int = 0,
    ) -> dict[str, Any]:
        """A page of the list of trajectories, with counts over all that are wanted.

        Args:
            wanted: which of them.
            runs: by number; () for all.
            sort: one of `SORTS`; those without a value come last.
            is_descending: the largest first.
            page: from 0 on, of `PAGE_ROWS` each.
        """
        began = time.perf_counter()
        chosen = [n for n in range(len(self.runs)) if not runs or n in runs]
        tables = {number: self.runs[number].index.table for number in chosen}
        rows = {number: wanted.rows(table) for number, table in tables.items()}
        whose = np.repeat(np.array(chosen, np.int64), [len(rows[number]) for number in chosen])
        where = np.concatenate([np.empty(0, np.int64), *rows.values()])

        def column(name: str) -> np.ndarray:
            parts = (tables[n].columns[name][rows[n]] for n in chosen)
            return np.concatenate([np.empty(0, COLUMNS[name]), *parts])

        key = column(SORTS[sort]).astype(np.float64)
        order = np.argsort(-key if is_descending else key, kind="stable")  # NaN is last
        shown = order[page * PAGE_ROWS : (page + 1) * PAGE_ROWS]
        rewards, correct = column("reward"), column("correct")
        outcomes: dict[str, int] = {}
        for number in chosen:
            table = tables[number]
            counted = np.bincount(table.columns["outcome"][rows[number]])
            for code in np.flatnonzero(counted).tolist():
                text = table.texts["outcome"][code]
                outcomes[text] = outcomes.get(text, 0) + int(counted[code])
        is_paid = ~np.isnan(rewards)
        return {
            "count": len(where),
            "total": sum(map(len, tables.values())),
            "pages": -(-len(where) // PAGE_ROWS),
            "page": page,
            "page_rows": PAGE_ROWS,
            "outcomes": dict(sorted(outcomes.items())),
            "known_outcomes": sorted({o for t in tables.values() for o in t.texts["outcome"]}),
            "correct": {name: int((correct == code).sum()) for name, code in CORRECT.items()},
            "mean_reward": float(rewards[is_paid].mean()) if is_paid.any() else None,
            "rows": [self._row(int(whose[n]), tables[int(whose[n])], int(where[n])) for n in shown],
            "took_ms": 1000 * (time.perf_counter() - began),
        }

    def _row(self, run: int, table: Table, row: int) -> dict[str, Any]:
        columns = table.columns
        names = ("step", "line", "reward", "advantage", "correct", "sample", "attempt")
        numbers = {name: columns[name][row].item() for name in (*names, "turns", "tokens")}
        task = table.text("task", row)
        return numbers | {
            "run": run,
            "sampled": columns["sampled"][row].item(),
            "outcome": table.text("outcome", row),
            "task": task,
            "key": self._key(task),
            "question": table.text("question", row)[:MAX_QUESTION],
            "answer": table.text("answer", row),
        }

    def _key(self, task: str) -> str:
        """A short name of a task for addresses, where an id may hold anything."""
        key = hashlib.sha256(task.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        self._tasks[key] = task
        return key

    def trajectory(self, run: int, step: int, line: int) -> dict[str, Any]:
        """A trajectory, its tokens with their texts, and the quantities of these."""
        chosen = self._run(run)
        record = chosen.index.read(step, line)
        tokens = Tokens.of(record)
        vocabulary = chosen.vocabulary
        texts = vocabulary.texts(tokens.token_ids.tolist())
        table = chosen.index.table
        task = record.get("task_id")
        group = Filter(task=task, step_min=step, step_max=step).rows(table)
        lists = {
            name
            for name, value in record.items()
            if isinstance(value, list) and value and number_of(value[0]) is not None
        }
        # Of a file that somebody changed, only pairs of whole numbers.
        contexts = record.get("contexts")
        pairs = [
            one
            for one in (contexts if isinstance(contexts, list) else [])
            if isinstance(one, list) and [*map(type, one)] == [int, int]
        ]
        return {
            "run": run,
            "step": step,
            "line": line,
            "key": self._key(str(task)),
            "record": {
                name: value
                for name, value in record.items()
                if name not in lists or name in ("turn_rewards", "turn_advantages")
            },
            "has_tokenizer": bool(vocabulary.bytes),
            "tokenizer": vocabulary.source,
            "tokens": {
                "ids": tokens.token_ids,
                "texts": [one["text"] for one in texts],
                "bytes": [one.get("bytes") for one in texts],
                "sampled": tokens.is_sampled.astype(int),
                "prompt_length": record.get("prompt_length"),
                "contexts": pairs,
            },
            "quantities": [
                {
                    **{n: getattr(one, n) for n in ("name", "label", "unit", "scale", "why")},
                    "values": None if one.values is None else np.round(one.values, 6),
                }
                for one in quantities(tokens, chosen.config)
            ],
            "group": [self._row(run, table, int(row)) for row in group],
        }

    def _run(self, number: int) -> Run:
        if not 0 <= number < len(self.runs):
            raise LookupError(f"there is no run number {number}; there are {len(self.runs)}.")
        return self.runs[number]

    def questions(self, text: str, runs: Sequence[int] = ()) -> dict[str, Any]:
        """Questions of which the text or the id has a part, with what became of them by run.

        Args:
            text: in upper or lower case; "" for all.
            runs: by number; () for all.

        Returns:
            The first `MAX_ROWS` rows, those with most trajectories first, and how many there are.
        """
        wanted = text.casefold()
        rows = []
        for number, run in enumerate(self.runs):
            if runs and number not in runs:
                continue
            table, answers = run.index.table, run.evaluations.answers
            for row in _by_task(table):
                if wanted in row["task"].casefold() or wanted in row["question"].casefold():
                    rows.append(row | {"run": number, "answers": len(answers.get(row["task"], ()))})
            drawn = set(table.texts["task"])
            for task, asked in answers.items():
                question = asked[0].question
                is_wanted = wanted in task.casefold() or wanted in question.casefold()
                if task not in drawn and is_wanted:
                    more = {"question": question, "count": 0, "steps": 0, "answers": len(asked)}
                    rows.append({"task": task, "run": number, "first": None, "last": None} | more)
        rows.sort(key=lambda row: (-row["count"], -row["answers"], row["task"], row["run"]))
        shown = [
            row | {"key": self._key(row["task"]), "question": row["question"][:MAX_QUESTION]}
            for row in rows[:MAX_ROWS]
        ]
        return {"count": len(rows), "rows": shown}

    def question(self, key: str) -> dict[str, Any]:
        """One question in all runs: its trajectories by step, its answers in evaluations.

        Args:
            key: of its task, as rows have it.
        """
        if key not in self._tasks:  # of a page that was opened before this process began
            for run in self.runs:
                for task in (*run.index.table.texts["task"], *run.evaluations.answers):
                    self._key(task)
        if key not in self._tasks:
            raise LookupError("there is no such question in these runs.")
        task = self._tasks[key]
        runs, evaluations = [], []
        question, accepted = "", []
        for number, run in enumerate(self.runs):
            table = run.index.table
            rows = Filter(task=task).rows(table)
            shown = [self._row(number, table, int(row)) for row in rows[-MAX_ROWS:]]
            if len(rows):
                question = table.text("question", int(rows[-1]))
            answers = run.evaluations.answers.get(task, [])
            if answers:
                question = question or answers[-1].question
                last = answers[-1]
                record = run.evaluations.response(last.stage, last.step, last.suite, last.row)
                accepted = record.get("answers", [])
            elif len(rows):
                row = table.columns
                step, line = (row[name][rows[-1]].item() for name in ("step", "line"))
                accepted = run.index.read(step, line).get("answers", [])
            runs.append({"run": number, "left_out": len(rows) - len(shown), "rows": shown})
            evaluations.append({"run": number, "answers": list(map(dataclasses.asdict, answers))})
        return {
            "task": task,
            "question": question,
            "accepted": accepted if isinstance(accepted, list) else [],
            "runs": runs,
            "evaluations": evaluations,
        }

    def answer(self, run: int, stage: str, step: int, suite: str, row: int) -> dict[str, Any]:
        """The record of one answer of an evaluation."""
        return self._run(run).evaluations.response(stage, step, suite, row)


MAX_QUESTION = 400
"""Characters of a question in a row of a list."""


def _by_task(table: Table) -> list[dict[str, Any]]:
    """Trajectories and steps of each task, and the mean reward in its first and its last step."""
    columns = table.columns
    tasks, steps, rewards = columns["task"], columns["step"], columns["reward"]
    num = len(table.texts["task"])
    counts = np.bincount(tasks, minlength=num)
    pairs = np.unique(np.stack([tasks, steps]), axis=1)
    num_steps = np.bincount(pairs[0], minlength=num)
    is_paid = ~np.isnan(rewards)

    def mean_at(step_of: np.ndarray) -> np.ndarray:
        kept = is_paid & (steps == step_of[tasks])
        total = np.bincount(tasks[kept], rewards[kept], minlength=num)
        with np.errstate(invalid="ignore"):
            return total / np.bincount(tasks[kept], minlength=num)

    first, last = np.full(num, np.iinfo(np.int32).max), np.full(num, -1)
    np.minimum.at(first, tasks, steps)
    np.maximum.at(last, tasks, steps)
    first_means, last_means = mean_at(first), mean_at(last)
    question = np.zeros(num, np.int64)
    question[tasks] = columns["question"]
    return [
        {
            "task": table.texts["task"][task],
            "question": table.texts["question"][question[task]],
            "count": int(counts[task]),
            "steps": int(num_steps[task]),
            "first": float(first_means[task]),
            "last": float(last_means[task]),
        }
        for task in np.flatnonzero(counts).tolist()
    ]
