import dataclasses
import json
import math

import numpy as np
import pytest

from jaxrl.data.tasks import check_data_sources
from jaxrl.envs.base import Outcome, Task, Turn
from jaxrl.evaluate import build_record, read_metrics, read_usage, write_results
from jaxrl.logs.eval_summary import (
    build_eval_metrics,
    format_suite_line,
    format_tables,
    get_subset_sizes,
    summarize_evaluation,
)
from jaxrl.logs.metrics import count_unscored_suites
from jaxrl.training.usage import UsageStats
from jaxrl.types import Group
from tests.episodes import ANSWER, COMPUTE, SEARCH, make_failure, make_trajectory

RIGHT = {"exact_match": 1.0, "f1": 1.0, "format": 0.5}
WRONG = {"exact_match": 0.0, "f1": 0.5, "format": -1.0}


def members():
    """Return four questions of two datasets, with one sample each."""
    return [
        make_trajectory(parts=RIGHT, data_source="nq"),
        make_trajectory(parts=WRONG, data_source="nq", turns=(ANSWER,), length=12),
        make_trajectory(parts=WRONG, data_source="hotpot", outcome=Outcome.OUT_OF_BUDGET),
        make_failure(data_source="hotpot", length=40),
    ]


def sample(question, index, parts, answer, **fields):
    played = make_trajectory(task_number=question, sample_index=index, parts=parts, **fields)
    return dataclasses.replace(played, final_answer=answer)


def four_samples():
    """Return three questions with four samples each, two of them with environment errors."""
    return [
        sample(0, 0, RIGHT, "The Tower!"),
        sample(0, 1, WRONG, "bridge"),
        sample(0, 2, RIGHT, "tower"),
        sample(0, 3, WRONG, "palace"),
        sample(1, 0, RIGHT, "Oslo", data_source="hotpot"),
        make_failure(task_number=1, sample_index=1, data_source="hotpot"),
        make_failure(task_number=1, sample_index=2, data_source="hotpot"),
        sample(1, 3, WRONG, "", data_source="hotpot", outcome=Outcome.MALFORMED),
        *(make_failure(task_number=2, sample_index=i, data_source="hotpot") for i in range(4)),
    ]


def questions(trajectories, num_samples=1):
    """Group the samples of each question, which are adjacent."""
    starts = range(0, len(trajectories), num_samples)
    return [Group(trajectories=tuple(trajectories[i : i + num_samples])) for i in starts]


def summary(trajectories, *, num_samples=1, ks=(), num_resamples=200, seed=0, **more):
    return summarize_evaluation(
        questions(trajectories, num_samples),
        ks=ks,
        num_resamples=num_resamples,
        seed=seed,
        **more,
    )


def test_means_by_hand():
    got = summary(members()).means
    assert got["nq"] == {
        "exact_match": 0.5,
        "f1": 0.75,
        "format": -0.25,
        "format_rate": 0.5,
        "searches": 0.5,
        "searched": 0.5,
        "sampled_tokens": 7.0,
        "answered": 1.0,
        "abstained": 0.0,
        "malformed": 0.0,
        "out_of_budget": 0.0,
        "precision": 0.5,
        "reliability": 0.5,
        "num_questions": 2,
        "unscored_questions": 0,
        "environment_errors": 0,
    }
    assert got["hotpot"]["exact_match"] == 0.0
    assert got["hotpot"]["out_of_budget"] == 1.0
    assert [got["hotpot"][name] for name in ("num_questions", "unscored_questions")] == [2, 1]
    assert got["hotpot"]["environment_errors"] == 1
    assert got["all"]["exact_match"] == pytest.approx(1 / 3)
    assert got["all"]["sampled_tokens"] == pytest.approx((4 + 10 + 4) / 3)
    assert got["mean"]["exact_match"] == 0.25
    assert got["mean"]["sampled_tokens"] == (7 + 4) / 2
    assert got["mean"]["num_questions"] == 4
    assert list(got) == ["all", "nq", "hotpot", "mean"]


def test_several_samples_by_hand():
    got = summary(four_samples(), num_samples=4, ks=(1, 2, 4)).means
    tower, half, everything = got["nq"], got["hotpot"], got["all"]
    assert [tower[f"pass@{k}"] for k in (1, 2, 4)] == [0.5, pytest.approx(5 / 6), 1.0]
    # Of the six pairs one is all tower, one has none, and four are tied. Of all four it wins.
    assert [tower[f"maj@{k}"] for k in (1, 2, 4)] == [0.5, pytest.approx(0.5), 1.0]
    # Of this question two samples are left: of a right answer and of none, the one that votes wins.
    assert (half["exact_match"], half["pass@2"], half["maj@2"]) == (0.5, 1.0, 1.0)
    assert (half["answered"], half["malformed"]) == (0.5, 0.5)
    assert math.isnan(half["pass@4"])
    assert math.isnan(half["maj@4"])
    assert [half[name] for name in ("num_questions", "unscored_questions")] == [2, 1]
    assert half["environment_errors"] == 6
    # A question counts once, however many of its samples could be scored.
    assert everything["exact_match"] == 0.5
    assert everything["pass@2"] == pytest.approx((5 / 6 + 1) / 2)
    assert everything["pass@4"] == 1.0
    assert math.isnan(got["mean"]["pass@4"])


def declining():
    """Return five questions: one right, one wrong, two declined, and one with an error."""
    unknown = {"parts": WRONG, "outcome": Outcome.ABSTAINED, "data_source": "untold"}
    return [
        make_trajectory(parts=RIGHT, data_source="told"),
        make_trajectory(parts=WRONG, data_source="told", turns=(COMPUTE, ANSWER)),
        make_trajectory(**unknown),
        make_trajectory(**unknown, turns=(SEARCH, SEARCH, COMPUTE, ANSWER)),
        make_failure(data_source="untold"),
    ]


def test_precision_and_reliability_by_hand():
    got = summary(declining(), has_python=True, num_resamples=50)
    told, untold, everything = (got.means[name] for name in ("told", "untold", "all"))
    # One of two answers is right, and one of four questions: (1 - 1/2) * 1/2 + 1/2 * 1/4.
    assert (everything["precision"], everything["reliability"]) == (0.5, 0.375)
    assert (told["precision"], told["reliability"]) == (0.5, 0.5)
    assert math.isnan(untold["precision"])  # nothing was answered
    assert untold["reliability"] == 0.0
    assert math.isnan(got.means["mean"]["precision"])
    assert got.means["mean"]["reliability"] == 0.25
    low, high = got.intervals["all"]["reliability"]
    assert 0 <= low < 0.375 < high <= 1
    assert got.intervals["untold"]["precision"] is None
    assert build_eval_metrics("greedy", got)["val-aux/all/precision/greedy"] == 0.5


def test_searches_and_python_calls_are_counted_separately():
    got = summary(declining(), has_python=True).means["all"]
    assert (got["searches"], got["searched"], got["python_calls"]) == (1.0, 0.75, 0.5)
    assert "python_calls" not in summary(declining()).means["all"]
    record = build_record(1, "train", {}, {"greedy": questions(declining())}, {})
    [*_, declined, _] = record["questions"]["greedy"]
    assert (declined["searches"], declined["python_calls"]) == (["q", "q"], ["print(6 * 7)"])


def test_subset_sizes():
    assert get_subset_sizes(1, (1,)) == ()
    assert get_subset_sizes(5, ()) == (2, 4, 5)
    assert get_subset_sizes(8, (1, 3)) == (1, 3)


def many(num_questions, *, share, data_source="nq", seed=0):
    """Return questions with two samples, both right or both wrong."""
    right = np.random.default_rng(seed).random(num_questions) < share
    return [
        sample(index, i, RIGHT if right[index] else WRONG, "x", data_source=data_source)
        for index in range(num_questions)
        for i in range(2)
    ]


def test_intervals_resample_questions_rather_than_samples():
    twice = summary(many(200, share=0.3), num_samples=2, num_resamples=2000)
    once = summary(many(200, share=0.3)[::2], num_resamples=2000)
    share = once.means["all"]["exact_match"]
    low, high = twice.intervals["all"]["exact_match"]
    # Two samples that always agree are worth one: the width of 200 questions, not of 400.
    width = 2 * 1.96 * math.sqrt(share * (1 - share) / 200)
    assert high - low == pytest.approx(width, rel=0.1)
    assert once.intervals["all"]["exact_match"] == (low, high)
    assert low < share < high


def test_intervals():
    trajectories = many(40, share=0.5) + many(10, share=0.5, data_source="hotpot", seed=1)
    got = summary(trajectories, num_samples=2)
    assert got == summary(trajectories, num_samples=2)
    assert got.intervals != summary(trajectories, num_samples=2, seed=1).intervals
    for name, means in got.means.items():
        for measure, (low, high) in got.intervals[name].items():
            assert low <= means[measure] <= high
        assert got.intervals[name]["answered"] == (1.0, 1.0)
        assert not got.intervals[name].keys() & {"num_questions", "environment_errors"}
    widths = {name: np.ptp(got.intervals[name]["exact_match"]) for name in got.means}
    # The macro-mean weighs ten questions as much as forty, so it is less sure than their mean.
    assert widths["nq"] < widths["hotpot"]
    assert widths["all"] < widths["mean"] < widths["hotpot"]


def test_intervals_resample_datasets_independently():
    # Equal data sets resampled by the same draws would leave the macro-mean as unsure as one set.
    trajectories = [t for name in "abcd" for t in many(100, share=0.5, data_source=name)]
    got = summary(trajectories, num_samples=2, num_resamples=2000).intervals
    ratio = np.ptp(got["mean"]["exact_match"]) / np.ptp(got["a"]["exact_match"])
    assert ratio == pytest.approx(0.5, rel=0.15)


def test_names_of_metrics():
    single = summary(members())
    sampled, greedy = (build_eval_metrics(suite, single) for suite in ("sampled", "greedy"))
    assert sampled["val-core/nq/exact_match/mean@1"] == 0.5
    assert greedy["val-core/nq/exact_match/greedy"] == 0.5
    assert sampled["val-core/mean/exact_match/mean@1"] == 0.25
    assert sampled["val-aux/hotpot/environment_errors/sampled"] == 1
    assert sampled["val-aux/nq/f1/sampled"] == 0.75
    assert not sampled.keys() & greedy.keys()
    assert all(name.startswith(("val-core/", "val-aux/")) for name in sampled)
    several = summary(four_samples(), num_samples=4)
    sampled = build_eval_metrics("sampled", several)
    assert {name for name in sampled if name.startswith("val-core/all/")} == {
        "val-core/all/exact_match/mean@4",
        "val-core/all/exact_match/best@2/mean",
        "val-core/all/exact_match/best@4/mean",
        "val-core/all/exact_match/maj@2/mean",
        "val-core/all/exact_match/maj@4/mean",
    }
    assert sampled["val-core/nq/exact_match/best@2/mean"] == pytest.approx(5 / 6)
    control = build_eval_metrics("empty_search", several)
    assert control["val-core/all/exact_match/empty_search"] == 0.5
    assert control["val-core/nq/exact_match/empty_search/maj@4/mean"] == 1.0
    assert not sampled.keys() & control.keys()


@pytest.mark.filterwarnings("error")
def test_results_on_disk(tmp_path):
    suites = {"sampled": members(), "greedy": [make_failure()]}
    summaries = {suite: summary(trajectories) for suite, trajectories in suites.items()}
    path = tmp_path / "eval" / "train_3.json"
    groups = {suite: questions(trajectories) for suite, trajectories in suites.items()}
    record = build_record(3, "train", {"samples": 1}, groups, summaries)
    write_results(path, record, format_tables(3, "train", summaries))
    text = path.read_text(encoding="utf-8")
    assert "NaN" not in text
    content = json.loads(text)
    assert (content["step"], content["stage"], content["settings"]) == (3, "train", {"samples": 1})
    assert content["summary"]["sampled"] == summaries["sampled"].means
    assert content["intervals"]["sampled"]["nq"]["exact_match"] == [0.0, 1.0]
    # Nothing could be scored: that is not an exact match of 0.
    unscored = content["summary"]["greedy"]["all"]
    assert "exact_match" not in unscored
    assert (unscored["searches"], unscored["environment_errors"]) == (None, 1)
    assert content["intervals"]["greedy"]["all"]["searches"] is None
    assert content["questions"]["sampled"][0] == {
        "task_id": "t0",
        "sample_index": 0,
        "data_source": "nq",
        "question": "Où ?",
        "answers": ["x"],
        "final_answer": "x",
        "outcome": "answered",
        "searches": ["q"],
        "num_sampled": 4,
        "response": "<search>q</search>\n\nfound\n\n<answer>x</answer>",
        "exact_match": 1.0,
        "f1": 1.0,
        "format": 0.5,
    }
    assert sorted(file.name for file in path.parent.iterdir()) == ["train_3.json", "train_3.txt"]


def test_an_evaluation_that_is_on_disk(tmp_path):
    """Its metrics are read instead of evaluating again, unless something differs or is missing."""
    path = tmp_path / "eval" / "evaluate_3.json"
    trajectories = {"sampled": four_samples()[:4], "greedy": members()[:3]}
    counts = {"sampled": 4, "greedy": 1}
    groups = {name: questions(trajectories[name], counts[name]) for name in counts}
    summaries = {name: summary(trajectories[name], num_samples=counts[name]) for name in counts}
    metrics = [build_eval_metrics(suite, summaries[suite]) for suite in counts]
    settings = {"samples": 4}
    assert read_metrics(path, 3, "a") is None
    record = build_record(3, "evaluate", settings, groups, summaries, fingerprint="a")
    write_results(path, record, "")
    np.testing.assert_equal(read_metrics(path, 3, "a"), metrics[0] | metrics[1])
    assert read_metrics(path, 2, "a") is None  # other weights
    assert read_metrics(path, 3, "b") is None  # other settings
    summaries["greedy"] = summary([make_failure()])
    record = build_record(3, "evaluate", settings, groups, summaries, fingerprint="a")
    write_results(path, record, "")
    assert read_metrics(path, 3, "a") is None  # the engine may answer now
    path.write_text('{"step": 3')
    assert read_metrics(path, 3, "a") is None


def test_tables_fit_a_terminal():
    names = ["a", "musique [red]", "a data set with an uncommonly long name", "2wiki"]
    trajectories = [t for name in names for t in many(3, share=0.5, data_source=name)]
    suite = summary(trajectories, num_samples=2, num_resamples=5)
    suite.means["all"].update(sampled_tokens=12_345.6, searches=12.34, environment_errors=98_760)
    suite.means["all"]["num_questions"] = 49_380
    text = format_tables(100_000, "evaluate", {"empty_search": suite})
    assert max(len(line) for line in text.splitlines()) <= 80
    for part in ("musique [red]", "12345.6", "12.34", "98760", "49380"):
        assert part in text
    assert "…" not in text


def test_reward_parts_with_weight_come_first():
    parts = [
        {"exact_match": 1.0, "a_judge": 0.9, "brevity": -0.4},
        {"exact_match": 0.0, "a_judge": 0.5, "brevity": 0.0},
    ]
    suite = summary(
        [make_trajectory(task_number=i, parts=p) for i, p in enumerate(parts)],
        weights={"brevity": 0.5},
    )
    assert list(suite.weights.items()) == [("brevity", 0.5), ("a_judge", 0.0), ("exact_match", 0.0)]
    rows = [line.split() for line in format_tables(1, "evaluate", {"greedy": suite}).splitlines()]
    start = rows.index(["reward", "part", "weight", "mean"])
    assert rows[start + 1] == ["all", "brevity", "0.5", "-0.200", "[-0.400,", "0.000]"]
    assert rows[start + 2][:4] == ["all", "a_judge", "0", "0.700"]
    assert format_suite_line("greedy", suite).startswith("greedy: reward -0.100; exact match 0")


def test_failures_have_no_score():
    failed = summary([make_failure(), make_failure(task_number=1)])
    line = format_suite_line("greedy", failed)
    assert line == "greedy: nothing could be scored (2 environment errors)"
    assert count_unscored_suites(build_eval_metrics("greedy", failed)) == 1
    scored = make_trajectory(parts={"exact_match": 1.0})
    partly = summary([scored, make_failure(task_number=1, data_source="x")])
    line = format_suite_line("greedy", partly)
    assert line.startswith("greedy: exact match all 1.000, nq 1.000, x -, ")
    assert count_unscored_suites(build_eval_metrics("greedy", partly)) == 0


def test_a_dataset_named_like_a_summary_is_refused():
    tasks = [Task(id="a", question="?"), Task(id="b", question="?", data_source="all")]
    check_data_sources(tasks[:1], "config.tasks.eval.source")
    with pytest.raises(ValueError, match="data_source of task 'b' is 'all'"):
        check_data_sources(tasks, "config.tasks.eval.source")


def searching(index, parts, *turns, **fields):
    played = make_trajectory(task_number=index, parts=parts, turns=(*turns, ANSWER), **fields)
    task = dataclasses.replace(played.task, answers=("Ada Kerr",))
    return dataclasses.replace(played, task=task)


def search_turn(query, text):
    shown = f"<information>{text}</information>"
    return Turn(text=f"<search>{query}</search>", tool_call=query, observation=shown)


KERR = "Doc 1(Title: Bridge) Built by Ada Kerr."
MILL = "Doc 1(Title: Mill) It burnt."


def attributed():
    """Return five questions: evidence used, ignored, not needed, not found, and a failure."""
    return [
        searching(0, RIGHT, search_turn("bridge", MILL), search_turn("who built it", KERR)),
        searching(
            1,
            WRONG,
            search_turn("bridge", KERR),
            search_turn("Bridge ", KERR),
            data_source="hotpot",
        ),
        searching(2, RIGHT),
        searching(
            3, WRONG, search_turn("mill", MILL), search_turn("its mill", MILL), data_source="hotpot"
        ),
        make_failure(task_number=4, data_source="hotpot"),
    ]


def test_attribution_of_answers_by_hand():
    got = summary(attributed(), tool_environments=[""])
    names = ("answer_in_results", "retrieved_but_ignored", "right_without_evidence")
    assert [got.means["all"][name] for name in names] == [2 / 4, 1 / 4, 1 / 4]
    assert [got.means["nq"][name] for name in names] == [1 / 2, 0, 1 / 2]
    assert [got.means["hotpot"][name] for name in names] == [1 / 2, 1 / 2, 0]
    assert got.means["all"]["redundant_searches"] == 2 / 4  # repeated; nothing new found
    assert got.means["hotpot"]["redundant_searches"] == 1.0
    record = build_record(
        1, "train", {}, {"sampled": questions(attributed())}, {}, tool_environments=[""]
    )
    used, ignored, _, _, failed = record["questions"]["sampled"]
    assert (used["answer_in_results"], used["retrieved_but_ignored"]) == (True, False)
    assert (ignored["retrieved_but_ignored"], ignored["redundant_searches"]) == (True, 1)
    assert "answer_in_results" not in failed
    assert build_eval_metrics("sampled", got)["val-aux/hotpot/retrieved_but_ignored/sampled"] == 0.5
    # Everything else is the same without it.
    bare = summary(attributed())
    for name, means in bare.means.items():
        assert means.items() <= got.means[name].items()
        assert bare.intervals[name].items() <= got.intervals[name].items()


def test_attribution_without_exact_match_does_not_say_what_is_right():
    played = [searching(0, {"own": 1.0}, search_turn("who built it", KERR))]
    got = summary(played, tool_environments=[""])
    means = got.means["all"]
    assert (means["answer_in_results"], means["redundant_searches"]) == (1.0, 0.0)
    for name in ("retrieved_but_ignored", "right_without_evidence"):
        assert math.isnan(means[name])
    record = build_record(1, "train", {}, {"greedy": questions(played)}, {}, tool_environments=[""])
    [question] = record["questions"]["greedy"]
    assert question["answer_in_results"] is True
    assert "retrieved_but_ignored" not in question


def test_usage_is_read_with_an_evaluation(tmp_path):
    path = tmp_path / "evaluate_3.json"
    assert read_usage(path) == UsageStats()
    usage = UsageStats.from_trajectories(attributed(), {"search": 0.5})
    write_results(path, {"ledger": usage.to_json()}, "")
    assert read_usage(path) == usage
    assert usage.usage.cost == 3.5  # seven searches, including the failed one
    write_results(path, {"step": 3}, "")
    assert read_usage(path) == UsageStats()


def test_environments_have_rows_and_rewards_of_their_own():
    def in_environment(name, source, reward, **fields):
        played = make_trajectory(reward=reward, data_source=source, **fields)
        task = dataclasses.replace(played.task, environment=name)
        return dataclasses.replace(played, task=task)

    got = summary(
        [
            in_environment("search", "nq", 2.0, parts=RIGHT),
            in_environment("search", "nq", 1.0, parts=WRONG),
            in_environment("search", "hotpot", 0.0, parts=WRONG),
            in_environment("math", "nq", -1.0, parts={"math": -1.0, "exact_match": 0.0}),
        ],
        weights={"reward": 1.0},
        tool_environments=["search"],
    )
    assert list(got.means) == [
        *("all", "search", "math", "search/nq", "search/hotpot"),
        "mean",  # over environments
    ]
    rewards = {name: means["reward"] for name, means in got.means.items()}
    assert rewards == {
        **{"all": 0.5, "search": 1.0, "math": -1.0, "mean": 0.0},
        **{"search/nq": 1.5, "search/hotpot": 0.0},
    }
    assert got.means["search"]["exact_match"] == pytest.approx(1 / 3)
    assert (got.weights["reward"], got.weights["exact_match"]) == (1.0, 0.0)
    # Only the environment with tools has results to attribute answers to.
    assert got.means["search"]["right_without_evidence"] == pytest.approx(1 / 3)
    assert got.means["all"]["right_without_evidence"] == pytest.approx(1 / 3)
    assert math.isnan(got.means["math"]["right_without_evidence"])
    metrics = build_eval_metrics("greedy", got)
    assert metrics["val-core/search/exact_match/greedy"] == pytest.approx(1 / 3)
    assert metrics["val-aux/math/reward/greedy"] == -1.0
    assert "exact match all 0.250, search 0.333, math 0.000" in format_suite_line("greedy", got)
