"""Facts of one run for its report: pure functions from the files' contents to plain data."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl.config.schema import default_config, flatten
from jaxrl.envs.protocol import PROTOCOLS
from jaxrl.extras.report.costs import Costs, attribution_of, costs_of
from jaxrl.extras.report.reading import ENVIRONMENT_ERRORS, RunFiles, mapping, place
from jaxrl.utils.json_io import number_of

SUITES = {
    "sampled": ("sampled", "drawn at random"),
    "greedy": ("greedy", "the most likely token each time"),
    "empty_search": ("search finds nothing", "a control: only guessing and memory are left"),
    "random_search": ("search finds anything", "a control: documents are drawn at random"),
    "blank_images": ("images show nothing", "a control: only guessing and the text are left"),
}
"""Evaluation suites: what the report calls them, and what they are."""

STAGES = {"sft": "warm start", "train": "reinforcement learning", "evaluate": "evaluation"}

PARTS = {
    "compiling": ("timing_s/compile",),
    "generation": ("timing_s/gen",),
    "update": ("timing_s/update_actor",),
    "evaluation": ("timing_s/testing",),
    "checkpoint": ("timing_s/save_checkpoint",),
}
"""Parts of a run's time, and the metrics that tell them."""

KINDS = {
    "found": ("Wrong, though found", "a search returned an accepted answer; another was given"),
    "not_found": ("Wrong, not found", "no search returned an accepted answer"),
    "no_search": ("Wrong, no search", "answered without asking"),
    "abstained": ("Abstained", "declined to answer"),
    "malformed": ("Malformed", "ended its turn with neither a search nor an answer"),
    "out_of_budget": ("Out of budget", "no tokens or searches left before the answer was whole"),
    "environment_error": ("Environment error", "the search failed; left out of the scores"),
}
"""Kinds of failure, and what they mean."""

_SCORE = re.compile(
    r"val-core/(.+)/exact_match/(mean@\d+|greedy|empty_search|random_search|blank_images)"
)
_TAG_NAMES = "|".join(dict.fromkeys(tag for make in PROTOCOLS.values() for tag in make().tags))
_SEGMENT = re.compile(rf"<({_TAG_NAMES})>(.*?)(?:</\1>|(?=<(?:{_TAG_NAMES})>)|\Z)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Score:
    """Exact match on some questions, with a 95% interval where there is one."""

    value: float
    low: float | None = None
    high: float | None = None
    num_questions: int | None = None  # that could be scored


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Exact match by suite and data set, at one place of the run."""

    stage: str
    step: int
    weights_step: int  # whose weights were evaluated
    scores: dict[str, dict[str, Score]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A suite's exact match on one data set in the first and in the last evaluation that has it."""

    suite: str
    data_set: str
    before: Score | None  # None where there is only one such evaluation
    after: Score
    steps: tuple[int, int]  # whose weights the two are of


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the reward: its weight, and by suite its first and last mean over all questions."""

    name: str
    weight: float  # 0 for one that is measured alone
    means: dict[str, tuple[Score | None, Score]]  # the first is None where there is only one


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A question before and after."""

    change: str
    before: dict[str, Any] | None
    after: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Failures:
    """One kind of failure in the last evaluation."""

    kind: str
    counts: dict[str, int]  # by suite
    example: dict[str, Any] | None  # of the suite that the report shows


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Time of a stage by its parts, in seconds."""

    stage: str
    num_steps: int
    parts: dict[str, float]
    throughput: float | None  # tokens per second, over the stage's steps

    @property
    def total(self) -> float:
        """The sum of all parts, in seconds."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a stage."""

    stage: str
    num_done: int
    num_planned: int | None
    is_done: bool  # all of its steps, or no more were wanted


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Signs that reinforcement learning had something to learn from."""

    num_steps: int
    num_failed: int  # steps of which every episode ended in an environment error
    num_equal: int  # others without a signal: all rewards that are compared were equal
    num_skipped: int  # steps without an update, as the gradient was not finite
    has_learned: bool  # an update had a gradient
    unscored: list[str]  # evaluations in which every episode failed


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A piece of a response: text between tags, or text outside of any."""

    kind: str  # a tag, `text`, or `forged` for a result that the model wrote itself
    text: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of one run."""

    files: RunFiles
    evaluations: list[Evaluation]
    rows: list[Row]
    parts: list[Part]
    changes: dict[str, int]  # questions by how their correctness changed
    pairs: list[Pair]
    pair_places: tuple[str, str] | None  # the two evaluations that pairs compare
    suite: str | None  # the one that pairs and failures show
    failures: list[Failures]
    num_evaluated: dict[str, int]  # questions of the last evaluation, by suite
    timings: list[Timing]
    changed_config: list[tuple[str, Any, Any]]  # key, value, default
    stages: list[Progress]
    learning: Learning
    stopped_early: int | None  # the step at which training did, for want of improvement
    weights_step: int | None  # whose weights it then went on with, where an evaluation tells
    costs: Costs | None  # None where no record tells
    attribution: dict[str, dict[str, float]]  # by suite, where answers come from

    @property
    def name(self) -> str:
        """The workdir's name."""
        return self.files.name

    @property
    def is_finished(self) -> bool:
        """True if every configured stage has come to its end."""
        return bool(self.stages) and all(stage.is_done for stage in self.stages)

    @property
    def signs_by_name(self) -> list[list[dict[str, Any]]]:
        """Signs of collapse, those of one name together, in the order in which they first came."""
        by_name: dict[str, list[dict[str, Any]]] = {}
        for sign in self.files.signs:
            by_name.setdefault(sign["sign"], []).append(sign)
        return list(by_name.values())


def facts_of(run: RunFiles) -> Facts:
    """Collects the facts of a run for its report."""
    evaluations = evaluations_of(run)
    asked = [evaluation for evaluation in run.evaluations if evaluation["questions"]]
    # Shown are answers of the last evaluation, sampled ones where there are any.
    suites = list(asked[-1]["questions"]) if asked else []
    suite = min(suites, key=lambda s: [*SUITES, s].index(s), default=None)
    with_suite = [evaluation for evaluation in asked if suite in evaluation["questions"]]
    pairs, changes = compare_questions(with_suite, suite) if suite else ([], {})
    last = asked[-1]["questions"] if asked else {}
    final = [evaluation for evaluation in evaluations if evaluation.stage == "evaluate"]
    early = [r["step"] for r in run.records if r["stage"] == "train" and r.get("stopped_early")]
    return Facts(
        files=run,
        evaluations=evaluations,
        rows=first_and_last(evaluations),
        parts=parts_of(run.evaluations),
        changes=changes,
        pairs=pairs,
        pair_places=(_where(with_suite[0]), _where(with_suite[-1])) if with_suite else None,
        suite=suite,
        failures=group_failures(last, suite),
        num_evaluated={name: len(records) for name, records in last.items()},
        timings=timings_of(run.records),
        changed_config=changed_config(run.config),
        stages=progress_of(run),
        learning=learning_of(run.records),
        stopped_early=early[-1] if early else None,
        weights_step=next((e.weights_step for e in final if early), None),
        costs=costs_of(run.records),
        attribution=attribution_of(run.evaluations),
    )


def _where(record: dict[str, Any]) -> str:
    place, weights = f"step {record['step']}", record["weights_step"]
    place += f", weights of step {weights}" if weights != record["step"] else ""
    return f"{STAGES.get(record['stage'], record['stage'])}, {place}"


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share of `count` independent questions.

    Wilson 1927, as in https://doi.org/10.1214/ss/1009213286.
    """
    z = 1.959964
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    spread = math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    half = z * spread / (1 + z * z / count)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def evaluations_of(run: RunFiles) -> list[Evaluation]:
    """Collects scores: from the records, and from the files of `eval/` what these lack."""
    scores: dict[tuple[int, str], dict[str, dict[str, Score]]] = {}
    weights: dict[tuple[int, str], int] = {}
    for record in (*run.records, *run.evaluations):
        if isinstance(record.get("weights_step"), int):
            weights[record["step"], record["stage"]] = record["weights_step"]
    for record in run.records:
        for key, value in record.items():
            match, number = _SCORE.fullmatch(key), number_of(value)
            if match and number is not None:
                data_set, suite = match[1], "sampled" if "@" in match[2] else match[2]
                names = ("num_questions", "unscored_questions", "environment_errors")
                count = _scored({n: record.get(f"val-aux/{data_set}/{n}/{suite}") for n in names})
                at = scores.setdefault((record["step"], record["stage"]), {})
                at.setdefault(suite, {})[data_set] = _score(number, None, count)
    for evaluation in run.evaluations:
        at = scores.setdefault((evaluation["step"], evaluation["stage"]), {})
        for suite, by_set in mapping(evaluation.get("summary")).items():
            for data_set, means in mapping(by_set).items():
                number = number_of(mapping(means).get("exact_match"))
                if number is not None:
                    interval: Any = evaluation.get("intervals")
                    for key in (suite, data_set, "exact_match"):
                        interval = mapping(interval).get(key)
                    count = _scored(means)
                    at.setdefault(suite, {})[data_set] = _score(number, interval, count)
    ordered = sorted(scores, key=lambda key: place({"step": key[0], "stage": key[1]}))
    return [
        Evaluation(stage=at[1], step=at[0], weights_step=weights.get(at, at[0]), scores=scores[at])
        for at in ordered
        if scores[at]
    ]


def _scored(counts: dict[str, Any]) -> int | None:
    """Questions that could be scored; older evaluations had one sample of each, and its error."""
    count, unscored = number_of(counts.get("num_questions")), counts.get("unscored_questions")
    unscored = counts.get("environment_errors") if unscored is None else unscored
    return None if count is None else int(count - (number_of(unscored) or 0))


def _score(value: float, interval: Any, count: int | None) -> Score:
    low = high = None
    if isinstance(interval, list) and [number_of(x) is not None for x in interval] == [True, True]:
        low, high = interval
    elif count and count > 0 and 0 <= value <= 1:
        low, high = wilson(value, count)
    return Score(value=value, low=low, high=high, num_questions=count)


def first_and_last(evaluations: Sequence[Evaluation]) -> list[Row]:
    """Each suite's and data set's first and last score; the suites in their usual order."""
    histories: dict[tuple[str, str], list[tuple[int, Score]]] = {}
    for evaluation in evaluations:
        for suite, by_set in evaluation.scores.items():
            for data_set, score in by_set.items():
                histories.setdefault((suite, data_set), []).append((evaluation.weights_step, score))
    order = [*SUITES, *dict.fromkeys(suite for suite, _ in histories if suite not in SUITES)]
    return [
        Row(
            suite=suite,
            data_set=data_set,
            before=scores[0][1] if len(scores) > 1 else None,
            after=scores[-1][1],
            steps=(scores[0][0], scores[-1][0]),
        )
        for (suite, data_set), scores in sorted(
            histories.items(), key=lambda item: (item[0][1] != "all", order.index(item[0][0]))
        )
    ]


def parts_of(evaluations: Sequence[dict[str, Any]]) -> list[Part]:
    """Parts of the reward in evaluations, those with weight first."""
    weights: dict[str, float] = {}
    means: dict[str, dict[str, list[Score]]] = {}
    for evaluation in evaluations:
        for suite, by_part in mapping(evaluation.get("reward_weights")).items():
            by_set = mapping(mapping(evaluation.get("summary")).get(suite))
            intervals = mapping(mapping(evaluation.get("intervals")).get(suite))
            for name, weight in mapping(by_part).items():
                mean = number_of(mapping(by_set.get("all")).get(name))
                if mean is not None and (known := number_of(weight)) is not None:
                    weights[name] = known
                    interval = mapping(intervals.get("all")).get(name)
                    score = _score(mean, interval, None)
                    means.setdefault(name, {}).setdefault(suite, []).append(score)
    return [
        Part(
            name=name,
            weight=weights[name],
            means={s: (v[0] if len(v) > 1 else None, v[-1]) for s, v in means[name].items()},
        )
        for name in sorted(weights, key=lambda name: not weights[name])
    ]


def held_out(facts: Facts) -> dict[tuple[str, str], tuple[Score | None, Score]]:
    """First and last score over all held-out questions, by measure and suite.

    The measure is exact match; where no evaluation has that, each part of the reward with weight.
    The first score is None where there is only one.
    """
    exact = {
        ("exact match", row.suite): (row.before, row.after)
        for row in facts.rows
        if row.data_set == "all"
    }
    return exact or {
        (part.name, suite): means
        for part in facts.parts
        if part.weight
        for suite, means in part.means.items()
    }


def gain(facts: Facts) -> str:
    """The result of a run in a line: held-out scores before and after; "" where it has none."""
    by_measure: dict[str, list[str]] = {}
    for (measure, suite), (before, after) in held_out(facts).items():
        name = SUITES[suite][0] if suite in SUITES else suite
        start = "" if before is None else f"{before.value:.3f} -> "
        by_measure.setdefault(measure, []).append(f"{name} {start}{after.value:.3f}")
    return "; ".join(f"{measure}: {', '.join(scores)}" for measure, scores in by_measure.items())


def is_right(record: dict[str, Any]) -> bool | None:
    """Return True if a question was answered right; None where it could not be scored."""
    score = number_of(record.get("exact_match"))
    failed = record.get("outcome") == "environment_error"
    return None if failed or score is None else score >= 1


def compare_questions(
    evaluations: Sequence[dict[str, Any]], suite: str
) -> tuple[list[Pair], dict[str, int]]:
    """Compares questions in the first and the last evaluation: examples, and counts of changes.

    Shown are two that became right, of two data sets where there are two, and one of each other
    kind: always the first ones, so that nothing is picked by hand.
    """

    def by_id(evaluation: dict[str, Any]) -> dict[Any, dict[str, Any]]:
        records = evaluation["questions"].get(suite, [])
        return {(str(r.get("task_id")), str(r.get("sample_index", 0))): r for r in records}

    first, last = by_id(evaluations[0]), by_id(evaluations[-1])
    names: dict[tuple[bool | None, bool | None], str] = {
        (False, True): "became right",
        (True, True): "right both times",
        (True, False): "became wrong",
        (False, False): "wrong both times",
    }
    if len(evaluations) == 1:
        first, names = {}, {(None, True): "right", (None, False): "wrong"}
    pairs: dict[str, list[Pair]] = {name: [] for name in names.values()}
    for key, after in last.items():
        before = first.get(key)
        change = names.get((is_right(before) if before else None, is_right(after)))
        if change:
            pairs[change].append(Pair(change=change, before=before, after=after))
    best, *others = pairs
    sources = [pair.after.get("data_source") for pair in pairs[best]]
    other_set = [p for p, of in zip(pairs[best], sources, strict=True) if of != sources[0]]
    shown = [*pairs[best][:1], *(other_set or pairs[best][1:])[:1]]
    shown += [pair for name in others for pair in pairs[name][:1]]
    return shown, {name: len(changed) for name, changed in pairs.items()}


def group_failures(questions: dict[str, list[dict[str, Any]]], suite: str | None) -> list[Failures]:
    """Failures of one evaluation by kind, most frequent in the shown suite first."""
    kinds = {name: [failure_kind(r) for r in records] for name, records in questions.items()}
    counts = {name: Counter(k for k in of_suite if k) for name, of_suite in kinds.items()}
    example: dict[str, dict[str, Any]] = {}
    shown = suite or ""
    for record, kind in zip(questions.get(shown, []), kinds.get(shown, []), strict=True):
        if kind:
            example.setdefault(kind, record)
    present = [kind for kind in KINDS if any(c[kind] for c in counts.values())]
    present.sort(key=lambda kind: -counts[suite][kind] if suite in counts else 0)
    by_suite = {kind: {name: c[kind] for name, c in counts.items()} for kind in present}
    return [Failures(kind=k, counts=by_suite[k], example=example.get(k)) for k in present]


def failure_kind(record: dict[str, Any]) -> str | None:
    """Classifies a question's record by `KINDS`; None for a right answer or one without a score."""
    outcome = record.get("outcome")
    if outcome == "environment_error":
        return "environment_error"
    if is_right(record) is not False:
        return None
    if outcome in KINDS:
        return str(outcome)
    results = [s.text for s in segments(str(record.get("response", ""))) if s.kind == "information"]
    if not results and not record.get("searches"):
        return "no_search"
    return "found" if record.get("answer_in_results") else "not_found"


def segments(response: str) -> list[Segment]:
    """A response in pieces by its tags, in order; a piece never closed ends at the next tag.

    A result stands where the environment puts it, right behind a search. Text that the model put
    between the same tags elsewhere is told apart.
    """
    pieces, end = [], 0
    for match in _SEGMENT.finditer(response):
        before = response[end : match.start()]
        pieces.append(Segment(kind="text", text=before))
        kind = match[1]
        if kind in ("information", "result"):
            after_call = response[: match.start()].rstrip().endswith(("</search>", "</python>"))
            kind = "information" if after_call else "forged"
        pieces.append(Segment(kind=kind, text=match[2].strip()))
        end = match.end()
    pieces.append(Segment(kind="text", text=response[end:]))
    return [piece for piece in pieces if piece.kind != "text" or piece.text.strip()]


def timings_of(records: Sequence[dict[str, Any]]) -> list[Timing]:
    """Times of each stage by their parts.

    What lies between two records, such as a checkpoint, counts with the later one.
    """
    timings = []
    for stage in dict.fromkeys(record["stage"] for record in records):
        of_stage = [record for record in records if record["stage"] == stage]

        # An argument with a default, as the loop goes on to other records.
        def total(*names: str, of_stage: list[dict[str, Any]] = of_stage) -> float:
            return sum(number_of(r.get(name)) or 0.0 for r in of_stage for name in names)

        parts = {part: total(*names) for part, names in PARTS.items()}
        steps = [record for record in of_stage if "timing_s/step" in record]
        step_s = total("timing_s/step")
        if not total("timing_s/update_actor"):  # a supervised step is nothing but its update
            parts["update"] = step_s - parts["generation"]
        known = sum(parts.values())
        parts["other"] = max(total("timing_s/wall") - known, step_s - known, 0.0)
        names = ("perf/throughput", "timing_s/step")
        rates = [[number_of(record.get(name)) or 0.0 for name in names] for record in steps]
        tokens = sum(throughput * seconds for throughput, seconds in rates)
        if sum(parts.values()) > 0:
            timing = Timing(
                stage=stage,
                num_steps=len(steps),
                parts={part: seconds for part, seconds in parts.items() if seconds >= 0.05},
                throughput=tokens / step_s if tokens and step_s else None,
            )
            timings.append(timing)
    return timings


def changed_config(config: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Keys that differ from the defaults: key, value, default (None for a key of another time)."""
    defaults = flatten(default_config())
    return [
        (key, value, defaults.get(key))
        for key, value in config.items()
        if key not in defaults or defaults[key] != value
    ]


def learning_of(records: Sequence[dict[str, Any]]) -> Learning:
    """Counts steps of reinforcement learning with a signal, and names evaluations that failed."""
    steps = [r for r in records if r["stage"] == "train" and "timing_s/step" in r]
    failed = [step for step in steps if step.get(ENVIRONMENT_ERRORS) == 1]
    silent = [step for step in steps if step.get("rollout/informative_share") == 0]
    equal = [step for step in silent if step.get(ENVIRONMENT_ERRORS) != 1]
    learned = [step.get("actor/num_learned", step.get("actor/grad_norm")) for step in steps]
    unscored = []
    for record in records:
        for suite in SUITES:
            names = ("unscored_questions", "num_questions")
            counts = [number_of(record.get(f"val-aux/all/{name}/{suite}")) for name in names]
            if counts[0] and counts[0] == counts[1]:
                unscored.append(f"{_where({'weights_step': record['step'], **record})}, {suite}")
    return Learning(
        num_steps=len(steps),
        num_failed=len(failed),
        num_equal=len(equal),
        num_skipped=sum(step.get("actor/skipped") == 1 for step in steps),
        # Where nothing tells, as in records of other times, nothing is said.
        has_learned=any(number_of(x) for x in learned) or all(x is None for x in learned),
        unscored=unscored,
    )


def progress_of(run: RunFiles) -> list[Progress]:
    """Each stage's steps done and planned; an evaluation counts as one step."""
    planned = {"sft": run.config.get("sft.num_steps"), "train": run.config.get("num_steps")}
    seen = dict.fromkeys(record["stage"] for record in run.records)
    stages = run.config.get("stages")
    wanted = stages if isinstance(stages, tuple | list) else ()
    progress = []
    for stage in (name for name in STAGES if name in wanted or name in seen):
        of_stage = [record for record in run.records if record["stage"] == stage]
        done = sum("timing_s/step" in record for record in of_stage)
        total = number_of(planned.get(stage))
        # Warm start comes before training; an evaluation may stand anywhere.
        is_done = total is not None and done >= total
        is_done |= stage == "sft" and "train" in seen
        is_done |= any(record.get("stopped_early") for record in of_stage)
        if stage == "evaluate":
            done, total, is_done = min(len(of_stage), 1), 1, bool(of_stage)
        num_planned = None if total is None else int(total)
        progress.append(
            Progress(stage=stage, num_done=done, num_planned=num_planned, is_done=is_done)
        )
    return progress
