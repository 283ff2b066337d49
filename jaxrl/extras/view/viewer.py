"""JSON responses to requests from the page.

The live server and the static page use the same addresses, each a name and integers, such as
`trajectory/0/20/3`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl.extras.view import facts
from jaxrl.extras.view.reader import RunReader
from jaxrl.extras.view.responses import FAILURES, split_response
from jaxrl.extras.view.tokens import Tokens, compute_quantities, decode_tokens, load_vocabulary
from jaxrl.extras.view.trajectories import COLUMNS
from jaxrl.utils.text import escape_control_chars

MAX_POINTS = 600
"""Maximum number of points in a curve."""

ARRAYS = (
    *("token_ids", "loss_mask", "rollout_logprobs", "rollout_entropies", "policy_versions"),
    *("old_logprobs", "new_logprobs", "ref_logprobs", "token_advantages", "token_weights"),
    "kl_weights",
)
"""Per-token lists of a trajectory, which the page receives as quantities instead."""


class Viewer:
    """Handler for the page's requests about runs.

    Methods in `ADDRESSES` raise a LookupError for a missing item, and a ValueError or OSError for
    an unreadable file.
    """

    def __init__(self, runs: Sequence[RunReader], ignore: Sequence[str] = ()):
        """Store the readers without reading files.

        Args:
            runs: Readers of the runs.
            ignore: Config keys or sections that may differ between runs of a group.
        """
        self.runs, self.ignore = runs, ignore
        self._vocabularies: dict[int, tuple[list[bytes], str]] = {}

    def refresh(self, seconds: float = math.inf) -> None:
        """Read changed files; stop indexing trajectories after `seconds`."""
        for run in self.runs:
            run.refresh(seconds / len(self.runs))

    def get_state(self) -> dict[str, Any]:
        """Return an object that changes whenever the page must be redrawn."""
        return {
            "version": sum(run.version for run in self.runs),
            "is_indexing": any(run.index.num_indexed < run.index.num_files for run in self.runs),
        }

    def get_overview(self) -> dict[str, Any]:
        """Return the summaries, groups and comparison of all runs."""
        groups = facts.group_runs(self.runs, self.ignore)
        return self.get_state() | {
            "runs": [facts.summarize_run(run) for run in self.runs],
            "groups": groups,
            "comparison": facts.compare_runs(self.runs, groups),
            "failures": FAILURES,
            "columns": COLUMNS,
        }

    def get_curves(self, run_index: int, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return a run's curves by stage and metric; all metrics if `names` is None."""
        run = self.runs[run_index]
        return {
            stage: {
                name: facts.compute_curve(run, stage, name, MAX_POINTS)
                for name in known
                if names is None or name in names
            }
            for stage, known in facts.list_metric_names(run).items()
        }

    def get_answers(self, run_index: int, suite: int) -> list[dict[str, Any]]:
        """Return the held-out answers of a suite in the first and last evaluation.

        Each item is a row of the last evaluation with two more keys. `before` is the same sample's
        row in the first evaluation, or None. `addresses` locate the complete records.
        """
        run = self.runs[run_index]
        name = facts.list_suites(run)[suite]
        evaluations = [
            (position, evaluation.answers[name])
            for position, evaluation in enumerate(facts.list_evaluations(run))
            if evaluation.answers.get(name)
        ]
        if not evaluations:
            return []
        (first, before), (last, after) = evaluations[0], evaluations[-1]
        earlier = {}
        if first != last:
            earlier = {_get_sample_key(row): (i, row) for i, row in enumerate(before)}
        rows = []
        for i, row in enumerate(after):
            addresses = [f"answer/{run_index}/{last}/{suite}/{i}"]
            index_before, row_before = earlier.get(_get_sample_key(row), (None, None))
            if row_before is not None:
                addresses.insert(0, f"answer/{run_index}/{first}/{suite}/{index_before}")
            rows.append(row | {"before": row_before, "addresses": addresses})
        return rows

    def get_answer(self, run_index: int, evaluation: int, suite: int, row: int) -> dict[str, Any]:
        """Return the complete record of an answer, with the response split into segments."""
        run = self.runs[run_index]
        name = facts.list_suites(run)[suite]
        record = dict(run.read_answer(run.evaluations[evaluation], name, row))
        response = str(record.pop("response", None) or "")
        return {"record": record, "segments": split_response(response)}

    def get_new_trajectories(
        self, run_index: int, generation: int, num_rows: int, num_tasks: int
    ) -> dict[str, Any]:
        """Return the index's rows and tasks that the page does not have yet."""
        index = self.runs[run_index].index
        if generation != index.generation:
            num_rows = num_tasks = 0
        return {
            "generation": index.generation,
            "num_known": [num_rows, num_tasks],
            "rows": index.rows[num_rows:],
            "tasks": index.tasks[num_tasks:],
        }

    def get_trajectory(self, run_index: int, step: int, line: int) -> dict[str, Any]:
        """Return a trajectory with the text and the quantities of each token."""
        run = self.runs[run_index]
        record = run.index.read(step, line)
        tokens = Tokens.from_record(record)
        vocabulary, problem = self._vocabularies.get(run_index, ([], ""))
        if not vocabulary:
            vocabulary, problem = load_vocabulary(run.workdir, run.config)
            self._vocabularies[run_index] = vocabulary, problem
        return {
            "record": {name: value for name, value in record.items() if name not in ARRAYS},
            "problem": problem,
            "ids": tokens.ids,
            "texts": decode_tokens(tokens.ids, vocabulary),
            "is_sampled": [int(value) for value in tokens.is_sampled],
            "quantities": compute_quantities(tokens),
        }

    def respond(self, address: str, **options: Any) -> Any:
        """Return the JSON response for an address, with unprintable characters escaped.

        Args:
            address: Key of `ADDRESSES` and integers, separated by slashes, such as `answers/0/2`.
            options: Keyword arguments for the method in `ADDRESSES`.

        Raises:
            LookupError: The address does not exist.
        """
        name, *numbers = address.split("/")
        method, count = ADDRESSES.get(name, (None, 0))
        is_valid = len(numbers) == count and all(map(_NUMBER.fullmatch, numbers))
        if method is None or not is_valid:
            raise LookupError(f"There is no item at {address!r:.80}.")
        return sanitize_json(method(self, *map(int, numbers), **options))


_NUMBER = re.compile("[0-9]{1,15}")

ADDRESSES: dict[str, tuple[Callable[..., Any], int]] = {
    "state": (Viewer.get_state, 0),
    "overview": (Viewer.get_overview, 0),
    "curves": (Viewer.get_curves, 1),
    "answers": (Viewer.get_answers, 2),
    "answer": (Viewer.get_answer, 4),
    "trajectories": (Viewer.get_new_trajectories, 4),
    "trajectory": (Viewer.get_trajectory, 3),
}
"""Method and number of integer arguments, by the first part of an address."""


def _get_sample_key(row: dict[str, Any]) -> tuple[str, float]:
    return row["task_id"], row["sample"]


def sanitize_json(value: Any) -> Any:
    """Escape control characters in a JSON value, and replace NaN and infinity with None."""
    if isinstance(value, str):
        return escape_control_chars(value)
    if isinstance(value, dict):
        return {
            escape_control_chars(str(key)): sanitize_json(inner) for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [sanitize_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
