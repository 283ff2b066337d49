"""Scores a policy on held-out tasks: roll out, summarise, write; suites and their stage.

`docs/evaluation.md` says what every number is. Rolling out needs the engine; the rest reads
trajectories alone, so they may come from anywhere as long as they are in the order of the tasks.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxrl.envs.answers import normalize_answer
from jaxrl.envs.attribution import Attribution, attribute
from jaxrl.envs.base import Outcome
from jaxrl.envs.json_text import read_object
from jaxrl.envs.text import printable
from jaxrl.logs.metrics import plain_number
from jaxrl.logs.records import question_record
from jaxrl.logs.statistics import (
    bootstrap_means,
    column_means,
    majority_at_k,
    pass_at_k,
    percentile_interval,
)
from jaxrl.logs.steps import memory_metrics
from jaxrl.logs.writers import write_images
from jaxrl.objectives.metrics import mean
from jaxrl.runtime import distributed
from jaxrl.runtime.compilation import stopped_by
from jaxrl.runtime.files import written_whole
from jaxrl.sampling.protocol import Sampling, Seeds
from jaxrl.sampling.weights import given_up
from jaxrl.session import OF_CODE, Session
from jaxrl.settings import STAGES
from jaxrl.training.health import first_error
from jaxrl.training.ledger import Ledger
from jaxrl.types import Draw, Group, Params, Trajectory, members

COUNTS = ("num_questions", "unscored_questions", "environment_errors")
"""Measures that are counted rather than averaged, and have no interval."""

OUTCOMES = tuple(outcome for outcome in Outcome if outcome != Outcome.ENVIRONMENT_ERROR)

RELIABILITY = ("precision", "reliability")
"""Measures that follow from the shares of right answers and of abstentions."""

CONTROLS = ("empty_search", "random_search")
"""Suites in which something else answers in place of the search engine."""

ATTRIBUTED = (
    "answer_in_results",
    "retrieved_but_ignored",
    "right_without_evidence",
    "redundant_searches",
)
"""Measures that `attribution` takes of the samples."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Measures of one suite, by data set and measure.

    The data set `all` is every question; `mean`, there with several data sets, is the mean of
    their means.

    Attributes:
        num_samples: of each question.
        means: means over questions; NaN where there is nothing to average.
        intervals: 95% bootstrap intervals of the means; None in place of NaN.
        weights: of every part of the reward, those with weight first.
    """

    num_samples: int
    means: dict[str, dict[str, float]]
    intervals: dict[str, dict[str, tuple[float, float] | None]]
    weights: dict[str, float] = field(default_factory=dict)


def summarize(
    questions: Sequence[Group],
    *,
    has_python: bool = False,
    has_results: bool = False,
    ks: Sequence[int] = (),
    num_resamples: int,
    seed: int,
    weights: Mapping[str, float] = MappingProxyType({}),
) -> Summary:
    """Means over questions with their intervals, by data set.

    Environment errors are left out and counted: a sample that had one out of its question, a
    question without any other sample out of the means, and one with fewer than k others out of
    pass@k and maj@k.

    Args:
        questions: the samples of each question, as many of every one.
        has_python: count calls of Python as well.
        has_results: tell what the results of tools were to the answers.
        ks: see `subset_sizes`.
        num_resamples: of the bootstrap.
        seed: of the bootstrap.
        weights: of parts of the reward; others have none.
    """
    sizes = sorted({len(question.trajectories) for question in questions})
    if len(sizes) != 1:
        raise ValueError(
            f"questions have {' and '.join(map(str, sizes)) or 'no'} samples; expected as many of "
            "each one."
        )
    [num_samples] = sizes
    ks = subset_sizes(num_samples, ks)
    measured = [
        _measures(question, ks, has_python) | (_attributed(question) if has_results else {})
        for question in questions
    ]
    names = list(dict.fromkeys(name for measures in measured for name in measures))
    values = np.array([[m.get(name, math.nan) for name in names] for m in measured])
    sources = [question.trajectories[0].task.data_source for question in questions]
    sets = {
        source: [row for row, own in enumerate(sources) if own == source]
        for source in dict.fromkeys(sources)
    }
    everything = {"all": list(range(len(questions)))} | sets
    rng = np.random.default_rng(seed)
    means = {
        name: _with_reliability(column_means(values[rows]), names)
        for name, rows in everything.items()
    }
    resampled = {
        name: _with_reliability(
            bootstrap_means(values[rows], num_resamples=num_resamples, rng=rng), names
        )
        for name, rows in everything.items()
    }
    names += RELIABILITY if "exact_match" in names else ()
    counts = {name: _counts([questions[row] for row in rows]) for name, rows in everything.items()}
    if len(sets) > 1:
        means["mean"] = np.mean([means[name] for name in sets], axis=0)
        resampled["mean"] = np.mean([resampled[name] for name in sets], axis=0)
        counts["mean"] = counts["all"]
    # All parts that the samples have: first those with weight, as they were given.
    parts = sorted({part for t in members(questions) if t.is_scored for part in t.reward_parts})
    weighed = [part for part, weight in weights.items() if weight and part in parts]
    return Summary(
        num_samples=num_samples,
        means={
            name: dict(zip(names, map(float, row), strict=True)) | counts[name]
            for name, row in means.items()
        },
        intervals={
            name: dict(zip(names, map(percentile_interval, columns.T), strict=True))
            for name, columns in resampled.items()
        },
        weights={part: weights.get(part, 0.0) for part in dict.fromkeys((*weighed, *parts))},
    )


def subset_sizes(num_samples: int, ks: Sequence[int]) -> tuple[int, ...]:
    """The k of pass@k and maj@k; of one sample none.

    Without `ks` they are verl's: the powers of two below the number of samples, and that number.
    """
    if num_samples == 1:
        return ()
    powers = (2**exponent for exponent in range(1, num_samples.bit_length()))
    return tuple(ks) or (*(power for power in powers if power < num_samples), num_samples)


def _measures(question: Group, ks: Sequence[int], has_python: bool) -> dict[str, float]:
    """Measures of one question's samples; NaN where there are too few of them."""
    scored = question.scored
    parts = sorted({name for t in scored for name in t.reward_parts})
    formats = [t.is_well_formed for t in scored if "format" in t.reward_parts]
    right = [t.reward_parts.get("exact_match") == 1.0 for t in scored]
    answers = [normalize_answer(t.final_answer) for t in scored]
    possible = [k for k in ks if k <= len(scored)] if "exact_match" in parts else []
    return {
        **{
            name: mean([t.reward_parts[name] for t in scored if name in t.reward_parts])
            for name in parts
        },
        **({"format_rate": mean(formats)} if formats else {}),
        "searches": mean([len(t.searches) for t in scored]),
        "searched": mean([bool(t.searches) for t in scored]),
        **({"python_calls": mean([len(t.python_calls) for t in scored])} if has_python else {}),
        "sampled_tokens": mean([t.num_sampled for t in scored]),
        **{str(name): mean([t.outcome == name for t in scored]) for name in OUTCOMES},
        **dict.fromkeys((f"{name}@{k}" for name in ("pass", "maj") for k in ks), math.nan),
        **{f"pass@{k}": pass_at_k(len(right), sum(right), k) for k in possible},
        **{f"maj@{k}": majority_at_k(answers, right, k) for k in possible},
    }


def _attributed(question: Group) -> dict[str, float]:
    """Mean `_attribution` of one question's samples."""
    found = [_attribution(t) for t in question.scored]
    return {name: mean([one[name] for one in found if name in one]) for name in ATTRIBUTED}


def _attribution(trajectory: Trajectory) -> dict[str, float]:
    """Relates results to a sample's answer: whether they held it, and what became of that.

    The latter where there is an exact match, by which samples are right.
    """
    found: Attribution = attribute(trajectory.turns, trajectory.task.answers)
    told: dict[str, float] = {"answer_in_results": found.has_evidence}
    if (score := trajectory.reward_parts.get("exact_match")) is not None:
        is_right = score == 1.0
        told["retrieved_but_ignored"] = found.has_evidence and not is_right
        told["right_without_evidence"] = is_right and not found.has_evidence
    return told | {"redundant_searches": found.num_redundant}


def _with_reliability(values: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Means `[.., M]` with those of `RELIABILITY` after them, where there is an exact match.

    With accuracy a and the share r of abstentions, precision is a / (1 - r), NaN where nothing was
    answered, and reliability (1 - r) * precision + r * a, that is a + r * a.
    BAPO (https://arxiv.org/abs/2601.11037).
    """
    if "exact_match" not in names:
        return values
    accuracy = values[..., names.index("exact_match")]
    abstained = values[..., names.index("abstained")]
    answered = np.where(abstained < 1, 1 - abstained, math.nan)
    more = (accuracy / answered, accuracy + abstained * accuracy)
    return np.concatenate([values, np.stack(more, axis=-1)], axis=-1)


def _counts(questions: Sequence[Group]) -> dict[str, int]:
    num_scored = [len(question.scored) for question in questions]
    num_samples = len(members(questions))
    counts = (len(questions), num_scored.count(0), num_samples - sum(num_scored))
    return dict(zip(COUNTS, counts, strict=True))


def as_metrics(suite: str, summary: Summary) -> dict[str, float]:
    """The means under verl's validation names: `mean@N`, `best@K/mean`, `maj@K/mean`."""
    is_sampled = suite == "sampled"
    core = "exact_match" if is_sampled else f"exact_match/{suite}"
    metrics = {}
    for data_set, means in summary.means.items():
        for name, value in means.items():
            if name == "exact_match":
                key = f"val-core/{data_set}/{core}"
                key += f"/mean@{summary.num_samples}" if is_sampled else ""
            elif name.startswith(("pass@", "maj@")):
                key = f"val-core/{data_set}/{core}/{name.replace('pass@', 'best@')}/mean"
            else:
                key = f"val-aux/{data_set}/{name}/{suite}"
            metrics[key] = value
    return metrics


def as_record(
    step: int,
    stage: str,
    settings: Mapping[str, Any],
    suites: Mapping[str, Sequence[Group]],
    summaries: Mapping[str, Summary],
    *,
    weights_step: int | None = None,
    made_with: str = "",
    has_results: bool = False,
) -> dict[str, Any]:
    """An evaluation as JSON: summaries, and every answer to every question.

    Args:
        step: over all stages.
        stage: that evaluates.
        settings: how it was measured.
        suites: the questions of each suite.
        summaries: of the same suites.
        weights_step: whose weights were evaluated; by default those of `step`.
        made_with: names all else that it depends on, for `read_metrics`.
        has_results: tell of each answer what the results of tools were to it.
    """
    return {
        "step": step,
        "stage": stage,
        "weights_step": step if weights_step is None else weights_step,
        "made_with": made_with,
        "settings": dict(settings),
        "summary": {
            suite: {
                name: {measure: plain_number(value) for measure, value in means.items()}
                for name, means in summary.means.items()
            }
            for suite, summary in summaries.items()
        },
        "intervals": {suite: summary.intervals for suite, summary in summaries.items()},
        "reward_weights": {suite: summary.weights for suite, summary in summaries.items()},
        "questions": {
            suite: [
                question_record(t, first_error([t]))
                | (_attribution(t) if has_results and t.is_scored else {})
                for t in members(questions)
            ]
            for suite, questions in suites.items()
        },
    }


def write(path: Path, record: Mapping[str, Any], text: str) -> None:
    """Writes the record to `path` and the text beside it as `.txt`, each all at once."""
    content = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    for name, written in ((path.with_suffix(".txt"), text), (path, content)):
        with written_whole(name) as file:
            file.write(written + "\n")


def read_metrics(path: Path, weights_step: int, made_with: str) -> dict[str, float] | None:
    """The metrics of an evaluation that `write` wrote, from a file of it without any error.

    None if there is none such: it is damaged, of other weights or settings, or the environment
    failed in it, which may be mended by now.

    Args:
        path: of the record.
        weights_step: whose weights it must have evaluated.
        made_with: what else it must have been made with.
    """
    try:
        record = read_object(path)
        if (record["weights_step"], record["made_with"]) != (weights_step, made_with):
            return None
        metrics: dict[str, float] = {}
        for suite, means in record["summary"].items():
            if means["all"]["environment_errors"]:
                return None
            numbers = {
                name: {k: math.nan if v is None else v for k, v in measures.items()}
                for name, measures in means.items()
            }
            num_samples = 1 if suite == "greedy" else record["settings"]["samples"]
            metrics |= as_metrics(
                suite, Summary(num_samples=num_samples, means=numbers, intervals={})
            )
        return metrics
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def read_ledger(path: Path) -> Ledger:
    """Reads an evaluation's ledger that `write` wrote; an empty one where its file has none."""
    try:
        return Ledger.from_json(read_object(path)["ledger"])
    except (OSError, ValueError, KeyError, TypeError):
        return Ledger()


def is_unscored(summary: Summary) -> bool:
    """Returns True if not a single question could be scored."""
    counts = summary.means["all"]
    return counts["unscored_questions"] == counts["num_questions"]


def one_line(suite: str, summary: Summary) -> str:
    """The scores of a suite in one line."""
    if is_unscored(summary):
        count = summary.means["all"]["environment_errors"]
        return f"{suite}: nothing could be scored ({count} environment errors)"
    scores = {name: m.get("exact_match", math.nan) for name, m in summary.means.items()}
    by_set = ", ".join(
        f"{name} {'-' if math.isnan(score) else f'{score:.3f}'}" for name, score in scores.items()
    )
    paid = [part for part, weight in summary.weights.items() if weight and part != "exact_match"]
    parts = "".join(f"; {part} {summary.means['all'][part]:.3f}" for part in paid)
    return f"{suite}: exact match {by_set}{parts}; searches {summary.means['all']['searches']:.2f}"


def as_text(
    step: int, stage: str, summaries: Mapping[str, Summary], *, weights_step: int | None = None
) -> str:
    """Tables of all suites for people, 80 columns wide."""
    title = f"{stage}, step {step}: means over questions [95% bootstrap interval]"
    if weights_step not in (None, step):
        title += f"\nstopped early: the weights are those of step {weights_step}"
    text = "\n\n".join([title, *(_suite_text(*item) for item in summaries.items())])
    return printable(text)  # data sets have names of the user's


SCORES = {"exact_match": "exact match", "f1": "F1", "format_rate": "format"}
BEHAVIOUR = {
    **{str(name): str(name).replace("out_of_", "out of\n") for name in OUTCOMES},
    "searches": "searches",
    "sampled_tokens": "tokens",
    "environment_errors": "errors",
}
"""Measures in the tables, and their heads."""

MORE = {
    "searched": "searched",
    "python_calls": "Python calls",
    "precision": "precision",
    "reliability": "reliability",
}
"""Measures in a table of their own, each where it tells something."""

EVIDENCE = {
    "answer_in_results": "in results",
    "retrieved_but_ignored": "of these wrong",
    "right_without_evidence": "right without",
    "redundant_searches": "redundant searches",
}
"""Measures of where answers come from, in a table of their own."""

DIGITS = {
    "searches": 2,
    "redundant_searches": 2,
    "python_calls": 2,
    "sampled_tokens": 1,
    **dict.fromkeys(COUNTS, 0),
}
"""Decimals of measures that are no shares."""


def _suite_text(suite: str, summary: Summary) -> str:
    # Of a single data set, `all` says everything.
    names = list(summary.means) if "mean" in summary.means else ["all"]
    measured = summary.means["all"]

    def table(first: str, columns: Mapping[str, str]) -> str:
        rows = [(name, *(_cell(summary, name, measure) for measure in columns)) for name in names]
        return _table((first, *columns.values()), rows)

    scores = {measure: head for measure, head in SCORES.items() if measure in measured}
    tables = [table("", {"num_questions": "questions", **scores})]
    if not summary.weights.keys() <= scores.keys():
        rows = [
            (name, part, f"{weight:.3g}", _cell(summary, name, part))
            for name in names
            for part, weight in summary.weights.items()
        ]
        tables.append(_table(("", "reward part", "weight", "mean"), rows))
    tables.append(table("", BEHAVIOUR))
    # Without any abstention, precision and reliability are the exact match.
    told = dict.fromkeys(RELIABILITY, "abstained")
    more = {
        name: head
        for name, head in MORE.items()
        if name in measured and measured[told.get(name, name)] > 0
    }
    if more:
        tables.append(table("", more))
    if "answer_in_results" in measured:
        tables.append(table("answer", EVIDENCE))
    ks = [measure.removeprefix("pass@") for measure in measured if measure.startswith("pass@")]
    if ks:
        rows = [
            (name, k, *(_cell(summary, name, f"{measure}@{k}") for measure in ("pass", "maj")))
            for name in names
            for k in ks
        ]
        tables.append(_table(("", "k", "pass@k", "maj@k"), rows))
    samples = f"{summary.num_samples} sample{'s' * (summary.num_samples > 1)} a question"
    return f"{suite}, {samples}\n" + "\n\n".join(tables)


def _cell(summary: Summary, name: str, measure: str) -> str:
    """A number, with its interval where the tables have room for one."""
    value = summary.means[name][measure]
    if math.isnan(value):
        return "-"
    text = f"{value:.{DIGITS.get(measure, 3)}f}"
    interval = summary.intervals[name].get(measure)
    if interval and (
        measure in summary.weights or measure.startswith(("pass@", *RELIABILITY, "maj@"))
    ):
        text += f" [{interval[0]:.3f}, {interval[1]:.3f}]"
    return text


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    table.add_column(heads[0], overflow="fold")
    for head in heads[1:]:
        is_name = head == "reward part"
        table.add_column(
            Text(head), justify="left" if is_name else "right", no_wrap=not is_name, overflow="fold"
        )
    for row in rows:
        table.add_row(*map(Text, row))
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def evaluate(session: Session, params: Params) -> Params:
    """The stage: scores parameters in all final suites, unless that is done and on disk.

    Nothing comes after it, so the parameters are given up: the sampler's weights take their room.
    """
    progress, workdir = session.progress, session.workdir
    file = workdir / "eval" / f"evaluate_{progress.step}.json"
    done, spent = None, Ledger()
    if distributed.is_main():
        done = read_metrics(file, progress.whose_weights, made_with(session))
        spent = read_ledger(file)
    errors: dict[str, str] = {}
    metrics = distributed.from_main(done)
    if metrics is None:
        session.check_budget()
        sampler = session.components.sampler
        if sampler is not None:
            session.compile_sampler()
            with stopped_by(session.should_stop):
                sampler.set_weights(given_up(session.components.model.whole(params)))
        metrics, errors = run_suites(session, "evaluate", session.settings.evaluation.final_suites)
        if sampler is not None:
            sampler.release()
    else:
        metrics |= _booked(session, Ledger.from_json(distributed.from_main(spent.to_json())))
        text = file.with_suffix(".txt")
        session.display.log(f"evaluated before, with the same settings: {text}")
    metrics |= progress.totals()
    metrics["weights_step"] = progress.whose_weights
    session.metrics_log.write(progress.step, "evaluate", metrics)
    session.failures.check_suites(errors)
    return params


def _booked(session: Session, spent: Ledger) -> dict[str, float]:
    """Counts what an evaluation took; its metrics."""
    session.progress.ledger += spent
    return spent.asked("eval/", session.progress.ledger) | spent.used("eval/")


def made_with(session: Session) -> str:
    """A hash of what an evaluation depends on beside the weights: settings, questions, corpus."""
    settings = session.settings.evaluation.depends_on
    read = ("model.path/", "tasks.eval.source", "search.local.corpus", "search.dense.")
    content = {
        name: value
        for name, value in session.origin["contents"].items()
        if name.startswith(read) or name.endswith(OF_CODE)
    }
    return hashlib.sha256(json.dumps([settings, content], sort_keys=True).encode()).hexdigest()


def run_suites(
    session: Session, stage: str, suites: Sequence[str]
) -> tuple[dict[str, float], dict[str, str]]:
    """Evaluates the engine's weights and writes `eval/<stage>_<step>.json` and `.txt`.

    Returns:
        Metrics, and the first error of each suite of which every episode failed.

    Raises:
        BudgetSpentError: a model behind an endpoint plays, and the run may spend no more.
    """
    step, display, settings = session.progress.step, session.display, session.settings.evaluation
    started = time.perf_counter()
    played: dict[str, list[Group]] = {}
    ledger = Ledger()
    for suite in suites:
        # Where a model behind an endpoint plays, the suites before may have spent what the run may:
        # its answers are recorded, so that the next start goes on from there.
        if session.components.external:
            session.check_budget(ledger)
        groups = played[suite] = play(session, suite)
        prices, is_control = session.settings.ledger.prices, suite in CONTROLS
        ledger += Ledger.of(members(groups), prices, is_control=is_control)
    summaries = {
        suite: summarize(
            groups,
            has_python=settings.has_python,
            has_results=settings.has_results,
            ks=settings.ks,
            num_resamples=settings.resamples,
            seed=session.settings.seed,
            weights=session.components.reward_weights,
        )
        for suite, groups in played.items()
    }
    if session.components.sampler is not None:
        session.components.sampler.clear()  # the cache; the weights are the next rollout's
    whose_weights = session.progress.whose_weights
    record = as_record(
        step,
        stage,
        settings.section,
        played,
        summaries,
        weights_step=whose_weights,
        made_with=made_with(session),
        has_results=settings.has_results,
    )
    record["ledger"] = ledger.to_json()
    text = as_text(step, stage, summaries, weights_step=whose_weights)
    if distributed.is_main():
        write(session.workdir / "eval" / f"{stage}_{step}.json", record, text)
        write_images(session.workdir, (t for groups in played.values() for t in members(groups)))
    unscored = [suite for suite, summary in summaries.items() if is_unscored(summary)]
    errors = {suite: first_error(members(played[suite])) for suite in unscored}
    for suite, error in errors.items():
        display.log(
            f"warning: {stage} {step} {suite}: no question could be scored, since every "
            f"episode ended in an environment error; the first: {error}"
        )
    lines = [f"{stage} {step} {one_line(suite, summary)}" for suite, summary in summaries.items()]
    for line in [text] if stage == "evaluate" else lines:
        display.log(line)
    metrics = {"timing_s/testing": time.perf_counter() - started, **memory_metrics()}
    metrics |= _booked(session, ledger)
    for suite, summary in summaries.items():
        metrics |= as_metrics(suite, summary)
    return metrics, errors


def play(session: Session, suite: str) -> list[Group]:
    """The held-out tasks under the engine's weights, as the suite wants them."""
    settings, components = session.settings.evaluation, session.components
    is_greedy = suite == "greedy"
    rollout = components.rollout if suite in ("sampled", "greedy") else components.controls[suite]
    return rollout(
        [Draw(task=task, stream_index=i) for i, task in enumerate(components.eval_tasks)],
        Sampling(
            group_size=1 if is_greedy else settings.samples,
            temperature=0.0 if is_greedy else settings.temperature,
            top_p=settings.top_p,
            seeds=Seeds(
                seed=session.settings.seed,
                stage=STAGES.index("evaluate"),
                step=session.progress.step,
            ),
        ),
        should_stop=session.should_stop,
        progress=session.display.counter(f"evaluating {suite}, trajectories"),
    )
