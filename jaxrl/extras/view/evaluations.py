"""Answers of a run's evaluations, by question."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.config.settings import STAGES
from jaxrl.extras.view.index import MAX_ANSWER, is_text
from jaxrl.utils.json_io import number_of, read_object

_FILE = re.compile(r"([a-z]{1,20})_(\d{1,9})\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One answer to a question of an evaluation; its response stays in the file."""

    stage: str
    step: int
    suite: str
    row: int  # in the suite
    task: str
    question: str
    answer: str
    outcome: str
    reward: float | None  # by the weights of the evaluation
    exact_match: float | None
    num_searches: int


class Evaluations:
    """Answers of all files of `eval/`; one thread refreshes them, others read `answers`.

    Attributes:
        answers: by task id, oldest evaluation first.
        problems: what could not be read.
    """

    answers: dict[str, list[Answer]]
    problems: list[str]

    def __init__(self, folder: Path):
        """Begins with nothing read.

        Args:
            folder: `eval/` of a run.
        """
        self.folder = folder
        self.answers, self.problems = {}, []
        self._files: dict[tuple[str, int], tuple[Path, tuple[int, int], list[Answer]]] = {}

    def refresh(self) -> bool:
        """Reads files that are new or have changed; returns True if there were any."""
        listed: dict[tuple[str, int], tuple[Path, tuple[int, int], list[Answer] | None]] = {}
        try:
            entries = sorted(self.folder.iterdir())
        except OSError:
            entries = []
        for path in entries:
            name = _FILE.fullmatch(path.name)
            if name is None or not path.is_file():
                continue
            about = path.stat()
            key, identity = (name[1], int(name[2])), (about.st_size, about.st_mtime_ns)
            known = self._files.get(key)
            listed[key] = known if known and known[1] == identity else (path, identity, None)
        if listed == self._files:
            return False
        files, problems = {}, []
        for (stage, step), (path, identity, answers) in listed.items():
            if answers is None:
                answers = []
                try:
                    answers = list(_answers(read_object(path), stage, step))
                except (OSError, ValueError) as error:
                    problems.append(f"eval/{path.name} cannot be read: {error}")
            files[stage, step] = (path, identity, answers)
        by_task: dict[str, list[Answer]] = {}
        for place in sorted(files, key=_when):
            for answer in files[place][2]:
                by_task.setdefault(answer.task, []).append(answer)
        self._files, self.answers, self.problems = files, by_task, problems
        return True

    def response(self, stage: str, step: int, suite: str, row: int) -> dict[str, Any]:
        """The record of an answer, read from its file.

        Raises:
            LookupError: there is none such.
            OSError, ValueError: the file cannot be read.
        """
        if (stage, step) not in self._files:
            raise LookupError(f"there is no evaluation {stage}_{step}.")
        content = read_object(self._files[stage, step][0])
        try:
            record = content["questions"][suite][row]
        except (LookupError, TypeError) as error:
            raise LookupError(f"{stage}_{step} has no answer {row + 1} in {suite!r}.") from error
        if not isinstance(record, dict):
            raise LookupError(f"{stage}_{step} has no answer {row + 1} in {suite!r}.")
        return record


def _when(place: tuple[str, int]) -> tuple[int, int]:
    """Key that sorts evaluations, by stage and step, in the order of a run."""
    stage, step = place
    return step, STAGES.index(stage) if stage in STAGES else len(STAGES)


def _answers(content: dict[str, Any], stage: str, step: int) -> Iterator[Answer]:
    suites, weights = content.get("questions"), content.get("reward_weights")
    for suite, records in suites.items() if isinstance(suites, dict) else ():
        paid = weights.get(suite) if isinstance(weights, dict) else None
        for row, record in enumerate(records if isinstance(records, list) else ()):
            if not isinstance(record, dict) or not is_text(record.get("task_id")):
                continue
            outcome, answer = record.get("outcome"), record.get("final_answer")
            searches, question = record.get("searches"), record.get("question")
            yield Answer(
                stage=stage,
                step=step,
                suite=suite,
                row=row,
                task=record["task_id"],
                question=question if isinstance(question, str) else "",
                answer=answer[:MAX_ANSWER] if isinstance(answer, str) else "",
                outcome=outcome if isinstance(outcome, str) else "",
                reward=_reward(record, paid),
                exact_match=number_of(record.get("exact_match")),
                num_searches=len(searches) if isinstance(searches, list) else 0,
            )


def _reward(record: dict[str, Any], weights: Any) -> float | None:
    """The sum of the parts by their weights; None where one is missing or nothing was scored."""
    if not isinstance(weights, dict) or record.get("outcome") == "environment_error":
        return None
    total = 0.0
    for part, value in weights.items():
        weight, amount = number_of(value), number_of(record.get(part))
        if weight is None or (weight and amount is None):
            return None
        total += weight * (amount or 0.0)
    return total
