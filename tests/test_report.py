"""Reports of runs made by hand: facts worked out on paper, hostile text, files that are missing."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from scipy.stats import binomtest

from jaxrl.config.schema import default_config, to_json
from jaxrl.extras.report import write_or_warn, write_report
from jaxrl.extras.report.__main__ import main
from jaxrl.extras.report.curves import (
    MAX_POINTS,
    NUM_COLORS,
    Series,
    charts_of,
    group_runs,
    running_mean,
    thin,
)
from jaxrl.extras.report.drawing import COLORS, DASHES, _draw
from jaxrl.extras.report.facts import Segment, facts_of, failure_kind, segments, wilson
from jaxrl.extras.report.page import duration, page, searched, visible
from jaxrl.extras.report.reading import read_run
from jaxrl.extras.report.table import table

CORPUS = {"search.local.corpus": "/a/b/c.jsonl", "search.local.topk": 3}


@pytest.mark.parametrize(
    ("engine", "settings", "said"),
    [
        ("local", {}, "b/c.jsonl, 3 documents a result"),
        ("http", {"topk": 4}, "what a server has, 4 documents a result"),
        ("web", {"provider": "brave", "topk": 5}, "the web by brave, 5 documents a result"),
        ("my_engine.Engine", {}, ""),
    ],
)
def test_what_was_searched_is_told(engine, settings, said):
    config = {f"search.{engine}.{name}": value for name, value in settings.items()}
    assert searched({"search.engine": engine, **CORPUS, **config}) == said


FOUND = "<search> q </search>\n\n<information>Doc 1(Title: X) born in Tarvik.</information>\n\n"
HOSTILE = (
    "</div></script><script>alert(1)</script><img src=x onerror=alert(2)>\" onmouseover='alert(3)'"
    "{{ 7 * 7 }}{% raw %}<!-- \x00\x1b[2J\ud800\u202e &lt; ]]>"
)


def question(task_id, *, right=0.0, outcome="answered", response="", data_source="one", **fields):
    return {
        "task_id": task_id,
        "data_source": data_source,
        "question": f"Where is {task_id}?",
        "answers": ["The Tarvik"],
        "final_answer": "Tarvik" if right else "Oslo",
        "outcome": outcome,
        "searches": ["q"] if "<search>" in response else [],
        "response": response,
        "exact_match": right,
        **fields,
    }


FIRST = [
    question("a", response="<answer> Oslo </answer>"),
    question("b", right=1.0, response=FOUND),
    question("c", response=FOUND, answer_in_results=True),
    question("d", response=FOUND, answer_in_results=True),
]
LAST = [
    question("a", right=1.0, response=FOUND + "<answer> Tarvik </answer>"),
    question("b", right=1.0, response=FOUND),
    question("c", right=1.0, response=FOUND, data_source="two"),
    question(
        "d",
        response=FOUND + "<answer> Oslo </answer>",
        data_source="two",
        answer_in_results=True,
    ),
]


def scored(suite, questions):
    name = "mean@1" if suite == "sampled" else suite
    return {
        f"val-core/all/exact_match/{name}": np.mean([q["exact_match"] for q in questions]),
        f"val-aux/all/num_questions/{suite}": len(questions),
        f"val-aux/all/environment_errors/{suite}": 0,
    }


def write_evaluation(workdir, stage, step, questions, **fields):
    (workdir / "eval").mkdir(exist_ok=True)
    content = {"step": step, "questions": questions, **fields}
    (workdir / "eval" / f"{stage}_{step}.json").write_text(json.dumps(content))


def make_run(workdir, *, first=FIRST, last=LAST, rewards=(0.25, 0.5, 0.75), **settings):
    """Two steps of warm start, three of reinforcement learning, an evaluation."""
    workdir.mkdir(parents=True)
    config = default_config()
    config.stages = ("sft", "train", "evaluate")
    config.num_steps, config.sft.num_steps = 3, 2
    config.model.path = "data/tiny/model"
    config.update_from_flattened_dict(settings)
    (workdir / "config.json").write_text(to_json(config))
    step_s = {"timing_s/step": 2.0, "timing_s/wall": 3.0, "perf/throughput": 100.0}
    records = [
        {"step": 1, "stage": "sft", "sft/loss": 4.0, "sft/entropy": 3.0, **step_s},
        {"step": 2, "stage": "sft", "sft/loss": 2.0, "sft/entropy": 1.0, **step_s},
        {"step": 2, "stage": "train", **scored("sampled", first), "timing_s/testing": 4.0},
    ]
    for step, reward in enumerate(rewards, 3):
        records.append(
            {
                "step": step,
                "stage": "train",
                "critic/rewards/mean": reward,
                "actor/ppo_kl": 0.0,
                "actor/entropy": 0.5,
                "outcome/answered": 1.0,
                "outcome/malformed": 0.0,
                "response_length/mean": None,
                **step_s,
                "timing_s/gen": 0.5,
                "timing_s/update_actor": 1.5,
                "timing_s/save_checkpoint": 0.25,
            }
        )
    end = {**scored("sampled", last), **scored("empty_search", first)}
    records.append({"step": 5, "stage": "evaluate", **end})
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    write_evaluation(workdir, "train", 2, {"sampled": first})
    write_evaluation(workdir, "evaluate", 5, {"sampled": last, "empty_search": first})
    return workdir


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def needs_chromium(test):
    """A test in a browser, where there is one."""
    missing = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
    return pytest.mark.minutes(missing(test))


def browse(path, tmp_path):
    """What Chromium makes of a page, as HTML."""
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--hide-scrollbars", "--disable-background-networking"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()]
    return subprocess.run(command, capture_output=True, timeout=120, check=True).stdout.decode()


class Page(HTMLParser):
    """What a browser would see: elements, attributes, text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        self.text += " " * (tag in ("td", "th", "p", "div", "small", "li", "summary"))

    def handle_data(self, data):
        self.text += data

    @property
    def words(self):
        return " ".join(self.text.split())


def told(*workdirs):
    """The words of a report; its charts are made but not drawn, which takes most of the time."""
    groups = group_runs([_facts(workdir) for workdir in workdirs])
    _, zero = charts_of(groups)
    return Page(page(groups, [], zero)).words


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A report with everything: page and plots."""
    return write_report([make_run(tmp_path_factory.mktemp("written") / "run")])


def test_signs_of_collapse_are_told_and_drawn(run):
    lines = [
        {"step": step, "stage": "train", "sign": "reward_fell", "text": HOSTILE, "action": "warn"}
        for step in (4, 3)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "sentinel.jsonl").write_text(text + '{"step": 4}\ncut')
    words = told(run)
    assert "signs of collapse 2, the first at step 4 step 4: reward_fell (warn): </div>" in words
    assert "Again at step 3; sentinel.jsonl has the texts." in words
    assert "2 of 4 lines of sentinel.jsonl are cut or damaged" in words
    charts, _ = charts_of(group_runs([facts_of(read_run(run))]))
    in_training = [chart for chart in charts if "train" in chart.stages]
    assert in_training
    assert all(list(chart.marks) == [3, 4] for chart in in_training)
    assert all("Vertical lines: signs" in chart.note for chart in in_training)
    [panel] = _draw(in_training[-1], is_page=True).axes[-1:]
    assert {3.0, 4.0} <= {line.get_xdata()[0] for line in panel.lines if len(line.get_xdata()) == 2}


class TestFacts:
    def test_scores_before_and_after(self, run):
        rows = {(r.suite, r.data_set): r for r in facts_of(read_run(run)).rows}
        sampled = rows["sampled", "all"]
        assert (sampled.before.value, sampled.after.value, sampled.steps) == (0.25, 0.75, (2, 5))
        assert sampled.after.num_questions == 4
        control = rows["empty_search", "all"]
        assert (control.before, control.after.value) == (None, 0.25)

    @pytest.mark.parametrize(("right", "count"), [(0, 4), (3, 4), (200, 200), (48, 200)])
    def test_intervals_are_wilsons(self, right, count):
        expected = binomtest(right, count).proportion_ci(method="wilson")
        np.testing.assert_allclose(wilson(right / count, count), expected, atol=1e-6)

    def test_intervals_of_the_evaluation_win(self, run):
        summary = {"sampled": {"all": {"exact_match": 0.75, "num_questions": 4}}}
        intervals = {"sampled": {"all": {"exact_match": [0.7, 0.8]}}}
        write_evaluation(
            run, "evaluate", 5, {"sampled": LAST}, summary=summary, intervals=intervals
        )
        score = facts_of(read_run(run)).rows[0].after
        assert (score.low, score.high) == (0.7, 0.8)

    @pytest.mark.parametrize(
        ("counts", "wanted"),
        [
            ({"num_questions": 9, "environment_errors": 2}, 7),  # one sample of each
            ({"num_questions": 9, "unscored_questions": 1, "environment_errors": 6}, 8),
            ({}, None),
        ],
    )
    def test_questions_that_were_scored(self, run, counts, wanted):
        summary = {"sampled": {"all": {"exact_match": 0.75, **counts}}}
        write_evaluation(run, "evaluate", 5, {"sampled": LAST}, summary=summary)
        assert _facts(run).rows[0].after.num_questions == wanted

    def test_questions_that_changed(self, run):
        facts = facts_of(read_run(run))
        assert facts.changes == {
            "became right": 2,
            "right both times": 1,
            "became wrong": 0,
            "wrong both times": 1,
        }
        shown = [(pair.change, pair.after["task_id"]) for pair in facts.pairs]
        # The first that became right, then the first of another data set.
        assert shown == [
            ("became right", "a"),
            ("became right", "c"),
            ("right both times", "b"),
            ("wrong both times", "d"),
        ]
        assert facts.pair_places == ("reinforcement learning, step 2", "evaluation, step 5")

    @pytest.mark.parametrize(
        ("kind", "fields"),
        [
            (None, {"right": 1.0}),
            (None, {"right": 1.0, "outcome": "out_of_budget"}),
            ("environment_error", {"right": 1.0, "outcome": "environment_error"}),
            ("malformed", {"outcome": "malformed"}),
            ("out_of_budget", {"outcome": "out_of_budget", "response": FOUND}),
            ("abstained", {"outcome": "abstained"}),
            ("no_search", {"response": "<answer> Oslo </answer>"}),
            ("found", {"response": FOUND, "answer_in_results": True}),
            # As where the query holds the answer too, and the result may be its echo.
            ("not_found", {"response": FOUND, "answer_in_results": False}),
            ("not_found", {"response": FOUND}),
            # Only what the environment inserted was found.
            ("no_search", {"response": "<information>Tarvik</information>"}),
        ],
    )
    def test_kinds_of_failure(self, kind, fields):
        assert failure_kind(question("a", **fields)) == kind

    def test_failures_by_kind_and_suite(self, run):
        got = [(f.kind, f.counts) for f in facts_of(read_run(run)).failures]
        assert got == [
            ("found", {"sampled": 1, "empty_search": 2}),
            ("no_search", {"sampled": 0, "empty_search": 1}),
        ]

    def test_time(self, run):
        sft, train = facts_of(read_run(run)).timings
        assert sft.parts == {"update": 4.0, "other": 2.0}
        assert train.parts == {
            "generation": 1.5,
            "update": 4.5,
            "evaluation": 4.0,
            "checkpoint": 0.75,
        }
        assert (train.num_steps, train.throughput) == (3, 100.0)

    def test_compiling_is_told_apart_from_loading_and_writing(self, run):
        """The sampler's programs are compiled before a stage's first step."""

        def compiled(record):
            is_first = (record["stage"], record["step"]) == ("train", 2)
            more = {"timing_s/compile": 1.25, "timing_s/wall": 5.5}
            return record | more if is_first else record

        change_records(run, compiled)
        [_, train] = facts_of(read_run(run)).timings
        assert train.parts["compiling"] == 1.25
        assert train.parts["other"] == pytest.approx(5.5 + 3 * 3.0 - 1.25 - 4.0 - 4.5 - 1.5 - 0.75)
        words = told(run)
        assert "compiling 1.2 s" in words
        assert "compiling: the sampler's programs; what a step compiles counts in it" in words
        assert "other: loading, writing files, export" in words

    def test_what_differs_from_the_defaults(self, run):
        changed = {key: (value, default) for key, value, default in _facts(run).changed_config}
        assert changed["num_steps"] == (3, 100)
        assert changed["model.path"] == ("data/tiny/model", "")
        assert set(changed) == {"stages", "num_steps", "sft.num_steps", "model.path"}

    def test_progress(self, run):
        facts = facts_of(read_run(run))
        stages = [(stage.stage, stage.num_done, stage.num_planned) for stage in facts.stages]
        assert stages == [("sft", 2, 2), ("train", 3, 3), ("evaluate", 1, 1)]
        assert facts.is_finished


def change_records(run, change):
    """Rewrites metrics.jsonl, each record as `change` would have it."""
    file = run / "metrics.jsonl"
    changed = [change(json.loads(line)) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(record) + "\n" for record in changed))


def stop_early(run):
    """What early stopping at step 5 of 12 leaves, with the weights of step 4."""
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "num_steps": 10}))
    scores = {3: 0.25, 4: 1.0, 5: 0.5}

    def change(record):
        step, stage = record["step"], record["stage"]
        if stage == "evaluate":
            return {**record, "weights_step": 4}
        if stage == "train" and step in scores:
            record |= {"val-core/all/exact_match/mean@1": scores[step]}
            record |= {"stopped_early": 1} if step == 5 else {}
        return record

    change_records(run, change)
    write_evaluation(run, "train", 5, {"sampled": FIRST})
    write_evaluation(run, "evaluate", 5, {"sampled": LAST}, weights_step=4)
    return run


class TestEarlyStopping:
    def test_scores_stand_at_the_step_of_their_weights(self, run):
        facts = _facts(stop_early(run))
        sampled = facts.rows[0]
        assert (sampled.after.value, sampled.steps) == (0.75, (2, 4))
        charts, _ = charts_of(group_runs([facts]))
        sampled, control = next(c for c in charts if c.name == "exact_match").series
        # The training's evaluations; the last one, of step 4 again, hides none of them.
        assert sampled.steps.tolist() == [2, 3, 4, 5]
        assert sampled.values.tolist() == [0.25, 0.25, 1.0, 0.5]
        assert control.steps.tolist() == [4]
        assert facts.pair_places[1] == "evaluation, step 5, weights of step 4"

    def test_it_is_an_end(self, run):
        facts = _facts(stop_early(run))
        assert (facts.is_finished, facts.stopped_early, facts.weights_step) == (True, 5, 4)
        words = told(run)
        assert "not finished" not in words
        assert "3 of 10 steps, stopped early at step 5, weights of step 4 · evaluation" in words

    def test_before_its_evaluation_it_is_not_known_whose_weights(self, run):
        file = stop_early(run) / "metrics.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
        (run / "eval" / "evaluate_5.json").unlink()
        words = told(run)
        assert "steps, stopped early at step 5 · evaluation to come" in words
        assert "not finished" in words

    def test_an_evaluation_ends_no_training(self, run):
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**config, "num_steps": 10}))
        assert "not finished" in told(run)


def _facts(run):
    return facts_of(read_run(run))


class TestSegments:
    def test_an_episode(self):
        text = "<think> t </think>" + FOUND + "so <answer> x </answer>"
        assert segments(text) == [
            Segment(kind="think", text="t"),
            Segment(kind="search", text="q"),
            Segment(kind="information", text="Doc 1(Title: X) born in Tarvik."),
            Segment(kind="text", text="\n\nso "),
            Segment(kind="answer", text="x"),
        ]

    def test_a_piece_never_closed_ends_at_the_next_tag(self):
        kinds = [(s.kind, s.text) for s in segments("<think> a <search> b </search> c")]
        assert kinds == [("think", "a"), ("search", "b"), ("text", " c")]

    def test_a_result_the_model_wrote_itself(self):
        assert [s.kind for s in segments("<information>x</information>")] == ["forged"]

    def test_the_results_of_another_protocol_are_found_too(self):
        text = "<search>q</search> <result>\nParis\n</result><result>Rome</result>"
        got = [(s.kind, s.text) for s in segments(text)]
        assert got == [("search", "q"), ("information", "Paris"), ("forged", "Rome")]


class TestCurves:
    def test_by_stage_on_the_global_axis(self, run):
        charts, zero = charts_of(group_runs([_facts(run)]))
        found = {chart.name: chart for chart in charts}
        assert zero == ["KL divergence"]
        entropy = found["entropy"]
        assert entropy.stages == ["sft", "train"]
        steps = {s.stage: s.steps.tolist() for s in entropy.series}
        assert steps == {"sft": [1, 2], "train": [3, 4, 5]}
        [reward] = found["reward"].series
        assert reward.values.tolist() == [0.25, 0.5, 0.75]
        assert found["reward"].scale == "rate"
        sampled, control = found["exact_match"].series
        assert (sampled.steps.tolist(), sampled.values.tolist()) == ([2, 5], [0.25, 0.75])
        assert control.steps.tolist() == [5]
        assert "0 throughout: malformed" in found["outcomes"].note
        assert "response_length" not in found  # never measured

    def test_seeds_are_one_curve(self, tmp_path):
        seeds = {0: (0.0, 0.5, 1.0), 1: (0.5, 0.5, 0.5), 2: (1.0, 0.5)}  # one was killed
        runs = [
            _facts(make_run(tmp_path / f"seed{seed}", seed=seed, rewards=rewards))
            for seed, rewards in seeds.items()
        ]
        [group] = group_runs(runs)
        assert group.label == "seed0, seed1, seed2"
        charts, _ = charts_of([group])
        [reward] = next(chart for chart in charts if chart.name == "reward").series
        assert reward.steps.tolist() == [3, 4]
        assert reward.values.tolist() == [0.5, 0.5]
        assert reward.low.tolist() == [0.0, 0.5]
        assert reward.high.tolist() == [1.0, 0.5]

    def test_configurations_apart_with_what_differs(self, tmp_path):
        runs = [
            _facts(make_run(tmp_path / "a", seed=1)),
            _facts(make_run(tmp_path / "b", **{"kl.coef": 0.1})),
            _facts(make_run(tmp_path / "c", seed=2)),
        ]
        groups = group_runs(runs)
        assert [(g.label, g.config) for g in groups] == [
            ("a, c", {"kl.coef": 0.0}),
            ("b", {"kl.coef": 0.1}),
        ]
        charts, _ = charts_of(groups)
        reward = next(chart for chart in charts if chart.name == "reward")
        assert [s.label for s in reward.series] == ["a, c", "b"]
        assert len(group_runs(runs, ["kl"])) == 1
        assert len(group_runs(runs, ["kl.coe"])) == 2

    def test_a_seed_without_values_is_left_out_and_named(self, tmp_path):
        runs = [make_run(tmp_path / f"seed{seed}", seed=seed) for seed in range(3)]
        change_records(
            runs[2], lambda r: {k: v for k, v in r.items() if not k.startswith(("val-", "critic"))}
        )
        shutil.rmtree(runs[2] / "eval")
        charts, _ = charts_of(group_runs([_facts(run) for run in runs]))
        charts = {chart.name: chart for chart in charts}
        [reward] = charts["reward"].series
        assert reward.values.tolist() == [0.25, 0.5, 0.75]
        assert "left out: seed2 (reward)." in charts["reward"].note
        wanted = "left out: seed2 (sampled, search finds nothing)."
        assert wanted in charts["exact_match"].note
        assert [s.label for s in charts["exact_match"].series] == [
            "sampled",
            "search finds nothing",
        ]

    def test_curves_without_a_common_step_are_named(self, tmp_path):
        runs = [stop_early(make_run(tmp_path / f"seed{seed}", seed=seed)) for seed in range(2)]
        write_evaluation(runs[1], "evaluate", 5, {"sampled": LAST}, weights_step=3)
        charts, _ = charts_of(group_runs([_facts(run) for run in runs]))
        chart = next(chart for chart in charts if chart.name == "exact_match")
        assert "share no step: search finds nothing." in chart.note

    def test_runs_of_unknown_configuration_are_no_seeds(self, tmp_path):
        runs = [make_run(tmp_path / name) for name in "ab"]
        for run in runs:
            (run / "config.json").unlink()
        assert [group.label for group in group_runs([_facts(run) for run in runs])] == ["a", "b"]

    def test_every_group_has_a_look_of_its_own(self, tmp_path):
        runs = [
            _facts(make_run(tmp_path / f"r{index}", **{"kl.coef": 0.1 * index}))
            for index in range(12)
        ]
        charts, _ = charts_of(group_runs(runs))
        for chart in charts:
            own = [s for s in chart.series if s.stage == chart.stages[0]]
            looks = {(s.color % len(COLORS), s.dash % len(DASHES)) for s in own}
            assert len(looks) == len(own), chart.name
        assert len(COLORS) == len(DASHES) == NUM_COLORS

    @pytest.mark.parametrize(
        ("name", "metric", "values", "wanted"),
        [
            ("kl", "actor/kl_loss", (0.0, 2e-4, 5e-4), (0.0, 5.25e-4)),
            ("kl", "actor/kl_loss", (-1e-4, 2e-4, 5e-4), None),
            ("reward", "critic/rewards/mean", (0.1, 0.2, 0.3), (-0.02, 1.02)),
            ("reward", "critic/rewards/mean", (-0.1, 0.2, 0.3), None),
            ("reward", "critic/rewards/mean", (0.1, 1.2, 1.3), None),
        ],
    )
    def test_axes_fit_the_values(self, run, name, metric, values, wanted):
        at = dict(zip((3, 4, 5), values, strict=True))
        change_records(
            run,
            lambda r: (
                r | {metric: at[r["step"]]} if r["stage"] == "train" and r["step"] in at else r
            ),
        )
        charts, _ = charts_of(group_runs([_facts(run)]))
        chart = next(chart for chart in charts if chart.name == name)
        low, high = _draw(chart, is_page=True).axes[0].get_ylim()
        if wanted:
            np.testing.assert_allclose((low, high), wanted, atol=1e-9)
        else:  # as far as the values go, and a little beyond
            reach = max(values) - min(values)
            assert min(values) - 0.1 * reach < low < min(values)
            assert max(values) < high < max(values) + 0.1 * reach

    def test_thinning_keeps_means_and_extremes(self):
        values = np.arange(2 * MAX_POINTS + 1, dtype=float)
        place = {"label": "", "stage": "train", "color": 0, "dash": 0, "is_points": False}
        got = thin(Series(steps=values, values=values, low=values, high=values, **place))
        assert len(got.values) <= MAX_POINTS
        assert got.values[:2].tolist() == got.steps[:2].tolist() == [1.0, 4.0]
        assert (got.low[0], got.high[0], got.high[-1]) == (0.0, 2.0, 800.0)

    def test_running_mean(self):
        got = running_mean(np.array([4.0, 1.0, 1.0, 1.0, 6.0]), 3)
        np.testing.assert_allclose(got, [4.0, 2.0, 1.0, 8 / 3, 3.5])


class TestPage:
    def test_tells_the_run(self, run):
        words = told(run)
        assert "tiny/model went through a warm start on demonstrations (2 steps)" in words
        assert "reinforcement learning (GRPO, 3 steps; reward: exact match)" in words
        assert "Scores are of 4 held-out questions" in words
        assert "0.250 → 0.750" in words
        assert "2 became right, 1 right both times, 0 became wrong, 1 wrong both times." in words
        assert "Configuration: 4 of" in words

    def test_a_run_that_learned_nothing(self, run):
        def spoilt(record):
            if record["step"] < 3 or record["stage"] != "train":
                return record
            failed = float(record["step"] == 3)
            return record | {
                "outcome/environment_error": failed,
                "rollout/informative_share": 0.0,
                "actor/num_learned": 0,
                "actor/skipped": 0.0,
            }

        change_records(run, spoilt)
        (run / "trajectories").mkdir()
        turns = [{"error": None}, {"error": "no <host>"}]
        (run / "trajectories" / "step_000003.jsonl").write_text(json.dumps({"turns": turns}))
        words = told(run)
        assert "nothing learned No update had a gradient. Of 3 steps 3 taught nothing" in words
        assert "every episode failed in 1, all rewards that are compared were equal in 2." in words
        assert "The first environment error: no <host>" in words

    def test_a_run_that_learned(self, run):
        assert "taught nothing" not in told(run)
        change_records(run, lambda r: r | {"rollout/informative_share": float(r["step"] != 4)})
        words = told(run)
        assert (
            "Of 3 steps 1 taught nothing: all rewards that are compared were equal in 1." in words
        )
        assert "nothing learned" not in words

    def test_an_evaluation_in_which_everything_failed(self, tmp_path):
        failed = [question("q1", outcome="environment_error", error="down")]
        run = make_run(tmp_path / "run")
        counts = {f"val-aux/all/{n}/greedy": 1 for n in ("num_questions", "unscored_questions")}
        change_records(run, lambda r: r | (counts if r["stage"] == "evaluate" else {}))
        (run / "eval" / "evaluate_5.json").write_text(json.dumps({"questions": {"greedy": failed}}))
        words = told(run)
        assert "not scored Every episode failed in evaluation, step 5, greedy." in words
        assert "The first environment error: down" in words

    def test_settings_that_changed_on_the_way(self, run):
        changes = {
            "optimizer.lr": {"before": 1e-6, "now": 1e-3},
            "num_steps": {"before": 2, "now": 3},
        }
        line = {"step": 4, "stages": ["train"], "changes": changes, "accepted": ["optimizer.lr"]}
        first = {"step": 0, "changes": {}, "contents": {}}
        lines = [json.dumps(first), json.dumps(line), '{"step": ']
        (run / "config_history.jsonl").write_text("\n".join(lines))
        words = told(run)
        assert "settings changed not one experiment: optimizer.lr after step 4." in words
        assert "Settings changed after step 4, : 2 keys, 1 of them another experiment's" in words
        assert "optimizer.lr 1e-06 0.001" in words
        assert "1 lines of config_history.jsonl are cut or damaged" in words

    def test_a_key_is_not_broken_within_a_word(self, written):
        """Keys break at their dots alone."""
        text = written.read_text(encoding="utf-8")
        assert "<code>sft.<wbr>num_steps</code>" in text
        css = text.split("<style>")[1].split("</style>")[0]
        assert ".config th { overflow-wrap: normal; }" in css

    def test_is_self_contained(self, written):
        text = written.read_text(encoding="utf-8")
        page = Page(text)
        assert page.tags.count("figure") == 6
        assert not {"script", "img", "iframe", "object", "embed"} & set(page.tags)
        links = [value for name, value in page.attributes if name in ("href", "src", "action")]
        assert all(link.startswith(("#", "data:")) for link in links)
        assert not re.findall(r"@import|url\((?!#)", text)
        assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {"http://www.w3.org/2000/svg"}
        assert "0 throughout, not drawn: KL divergence" in page.words
        ids = [value for name, value in page.attributes if name == "id"]
        assert len(ids) == len(set(ids))

    def test_plots(self, written):
        plots = sorted((written.parent / "plots").iterdir())
        assert [path.stem for path in plots] == [
            "entropy",
            "exact_match",
            "loss",
            "outcomes",
            "reward",
            "throughput",
        ]
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots)
        assert written == written.parent.resolve() / "report.html"

    def test_several_runs(self, tmp_path):
        runs = [make_run(tmp_path / "runs" / f"s{seed}", seed=seed) for seed in (0, 1)]
        other = make_run(tmp_path / "runs" / "warm", **{"optimizer.lr": 3e-4})
        words = told(*runs, other)
        assert "2 configurations, 3 runs" in words
        assert "mean ± standard deviation over the 2 finished of 2 runs" in words
        assert "0.250 ± 0.000 → 0.750 ± 0.000" in words
        assert "What differs key s0, s1 warm optimizer.lr 1e-06 0.0003" in words

    def test_means_are_over_the_finished_runs_that_have_a_score(self, tmp_path):
        runs = [make_run(tmp_path / f"s{seed}", seed=seed) for seed in range(4)]
        last = runs[2] / "metrics.jsonl"  # killed on its way
        last.write_text("".join(last.read_text().splitlines(keepends=True)[:4]))
        (runs[2] / "eval" / "evaluate_5.json").unlink()
        shutil.rmtree(runs[3] / "eval")  # finished, but never scored
        change_records(
            runs[3], lambda r: {k: v for k, v in r.items() if not k.startswith("val-core")}
        )
        words = told(*runs)
        assert "mean ± standard deviation over the 3 finished of 4 runs" in words
        assert "0.250 ± 0.000 → 0.750 ± 0.000of 2 runs" in words
        assert "s2not finished" in words

    def test_a_run_named_twice_counts_once(self, run):
        written = write_report([run, run.parent / "." / run.name])
        assert written == run.resolve() / "report.html"
        assert "2 runs" not in Page(written.read_text(encoding="utf-8")).words

    def test_numbers_for_people(self):
        assert [duration(s) for s in (1.25, 245, 7800)] == ["1.2 s", "4 min 05 s", "2 h 10 min"]
        assert visible("a\x00b\u202ec") == r"a\x00b\u202ec"
        assert visible("x" * 4000).endswith(" … (1,000 more characters)")


def make_hostile(workdir):
    """Everything a model, a data set or a name can hold, everywhere it can stand."""
    fields = {"question": HOSTILE, "answers": [HOSTILE], "final_answer": HOSTILE}
    response = f"<think>{HOSTILE}</think>{HOSTILE}<search>{HOSTILE}</search>\n\n<information>"
    response += f"{HOSTILE}</information>\n\n<answer>{HOSTILE}</answer>"
    bad = [question(HOSTILE, response=response, data_source=HOSTILE, **fields)]
    run = make_run(workdir, first=bad, last=bad, **{"prompt.system": HOSTILE[:-20]})
    sets = {name: {"exact_match": 0.5, "num_questions": 4} for name in ("all", HOSTILE, "$x_$^")}
    for stage, step in (("train", 2), ("evaluate", 5)):
        summary = {"sampled": sets, HOSTILE: sets}
        write_evaluation(run, stage, step, {"sampled": bad, HOSTILE: bad}, summary=summary)
    start = {name: HOSTILE for name in ("started", "commit", "num_tasks")}
    start |= {"versions": {HOSTILE: HOSTILE}, "machine": {HOSTILE: HOSTILE}, "model": {}}
    (run / "environment.json").write_text(json.dumps([{"step": HOSTILE, **start}]))
    return run


def table_of(*workdirs):
    """Cells of the terminal's table, by line."""
    lines = table(group_runs([_facts(workdir) for workdir in workdirs])).splitlines()
    return [re.split(r"\s{2,}", line.strip()) for line in lines]


class TestComparison:
    """The same numbers for several runs on the page and on the terminal."""

    def test_a_sweep(self, tmp_path):
        runs = [
            make_run(tmp_path / f"lr_{lr}", **{"optimizer.lr": lr, "search.local.topk": 3 + index})
            for index, lr in enumerate((1e-6, 3e-6))
        ]
        ledger = {"ledger/total/trajectories": 9, "ledger/total/sampled_tokens": 12_345}
        change_records(runs[0], lambda r: r | ledger)
        # Three of four right. 6 s of warm start; 1.5 + 4.5 + 0.75 s of training, 4 s of evaluation.
        low, high = wilson(0.75, 4)
        measures, header, _, first, below, second, _ = table_of(*runs)
        assert measures == ["exact match,", "exact match,", "tokens"]
        names = ["run", "what differs", "step", "sampled", "search finds nothing"]
        assert header == [*names, "sampled", "time"]
        scores = ["0.250 → 0.750", "0.250"]
        assert first == ["lr_1e-06", "optimizer.lr=1e-06", "5", *scores, "12,345", "16.8 s"]
        intervals = [f"{low:.3f} to {high:.3f}", "0.046 to 0.699"]
        assert below == ["search.local.topk=3", *intervals]
        assert second[-2:] == ["–", "16.8 s"]
        words = told(*runs)
        assert f"0.250 → 0.750{low:.3f} to {high:.3f}" in words
        assert "12,345 16.8 s" in words

    def test_runs_with_other_measures_on_their_way_or_only_begun(self, tmp_path):
        whole = make_run(tmp_path / "whole")
        other = make_run(tmp_path / "other", **{"kl.coef": 0.1})
        change_records(other, lambda r: {k: v for k, v in r.items() if "exact_match" not in k})
        for stage, step, mean in (("train", 2, 0.25), ("evaluate", 5, 0.5)):
            write_evaluation(
                *(other, stage, step, {}),
                summary={"greedy": {"all": {"brevity": mean}}},
                reward_weights={"greedy": {"brevity": 0.5}},
                intervals={"greedy": {"all": {"brevity": [0.375, 0.625]}}},
            )
        begun = make_run(tmp_path / "begun", **{"kl.coef": 0.2})
        shutil.rmtree(begun / "eval")
        (begun / "metrics.jsonl").write_text("")
        measures, header, _, one, _, two, below, *three = table_of(whole, other, begun)
        assert measures == ["exact match,", "exact match,", "brevity,", "tokens"]
        assert header[3:] == ["sampled", "search finds nothing", "greedy", "sampled", "time"]
        assert one[5] == "–"
        assert two[3:6] == ["–", "–", "0.250 → 0.500"]
        assert below == ["0.375 to 0.625"]
        assert three == [["begun", "kl.coef=0.2", *"––––––"], ["not finished"]]
        words = told(whole, other, begun)
        assert "brevity, greedy" in words
        assert "0.250 → 0.5000.375 to 0.625" in words

    def test_seeds_end_in_their_mean(self, tmp_path):
        runs = [make_run(tmp_path / f"s{seed}", seed=seed) for seed in (0, 1)]
        _, header, *_, mean, below = table_of(*runs)
        assert "what differs" not in header
        assert mean[:2] == ["mean ± deviation", "0.250 ± 0.000 → 0.750 ± 0.000"]
        assert below[0] == "of 2 finished"

    def test_foreign_text_is_shown_as_it_is(self, tmp_path):
        bad = make_hostile(tmp_path / "[red]x")
        words = table(group_runs([_facts(bad), _facts(make_run(tmp_path / "b"))]))
        assert "[red]x" in words
        assert "\x1b" not in words
        assert "\u202e" not in words
        assert r"\x1b[2J" in words

    def test_the_command_prints_it_before_the_page(self, tmp_path, capsys):
        runs = [make_run(tmp_path / f"lr_{lr}", **{"optimizer.lr": lr}) for lr in (1e-6, 3e-6)]
        main([*map(str, runs)])
        printed = capsys.readouterr().out.splitlines()
        assert "optimizer.lr=3e-06" in printed[-3]
        assert printed[-1] == str(tmp_path / "report.html")


class TestForeignText:
    def test_shows_as_text(self, tmp_path):
        path = write_report([make_hostile(tmp_path / "<b>$run")])
        page = Page(path.read_text(encoding="utf-8"))
        assert not {"script", "img"} & set(page.tags)
        assert "<b>$run" in page.text
        assert not [name for name, _ in page.attributes if name.startswith("on")]
        assert "<script>alert(1)</script>" in page.text
        assert "{{ 7 * 7 }}{% raw %}" in page.text
        assert "49" not in page.text.replace("0.49", "")
        controls = [chr(code) for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"]
        assert not {*controls, "\u202e"} & set(page.text)
        assert r"\x00\x1b[2J" in page.text
        assert r"\u202e" in page.text

    @needs_chromium
    def test_runs_nothing_in_a_browser(self, tmp_path):
        path = write_report([make_hostile(tmp_path / "run")])
        document = Page(browse(path, tmp_path))
        assert "h1" in document.tags
        assert not {"script", "img"} & set(document.tags)


FRAMES = """<body><script>
addEventListener("load", () => {
  const widths = [...document.querySelectorAll("iframe")].map((frame) => {
    const page = frame.contentDocument;
    const measured = [page.scrollingElement.scrollWidth];
    page.querySelectorAll("details").forEach((details) => { details.open = true; });
    return [...measured, page.scrollingElement.scrollWidth];
  });
  document.title = JSON.stringify(widths);
});
</script></body>"""
"""How wide pages are in frames, with what is folded closed and then open."""


class TestWidth:
    @needs_chromium
    @pytest.mark.parametrize("kind", ["plain", "hostile", "several"])
    def test_nothing_sticks_out(self, tmp_path, kind):
        run = make_run if kind == "plain" else make_hostile
        runs = [run(tmp_path / f"a run with quite a long name {index}") for index in range(3)]
        path = write_report(runs if kind == "several" else runs[:1], out=tmp_path / "page.html")
        text = html.escape(path.read_text(encoding="utf-8"))
        widths = (390, 820, 1180, 1600)  # phone, tablet, the page's own, desktop
        frames = [f'<iframe width={w} height=800 frameborder=0 srcdoc="{text}">' for w in widths]
        outer = tmp_path / "frames.html"
        outer.write_text("".join(f"{frame}</iframe>" for frame in frames) + FRAMES)
        [found] = re.findall(r"<title>(.*?)</title>", browse(outer, tmp_path).split("<iframe")[0])
        assert json.loads(found) == [[width, width] for width in widths]


class TestTolerance:
    @pytest.mark.parametrize("missing", ["metrics.jsonl", "config.json", "eval"])
    def test_missing_files(self, run, missing):
        path = run / missing
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        words = told(run)
        assert (f"{missing} is missing" in words) == (missing != "eval")
        assert "environment.json is missing" in words

    def test_a_line_cut_in_two(self, run):
        file = run / "metrics.jsonl"
        file.write_bytes(file.read_bytes()[:-30] + b"\xc3")
        words = told(run)
        assert "1 of 7 lines of metrics.jsonl are cut or damaged" in words
        assert "not finished" in words

    def test_damaged_files(self, run):
        for path in (run / "config.json", *(run / "eval").iterdir(), run / "environment.json"):
            path.write_text('{"step": [')
        assert "could not be read" in told(run)

    @pytest.mark.parametrize("content", ["[]", "3", "{}", '{"questions": {"sampled": [1, {}]}}'])
    def test_files_that_hold_something_else(self, run, content):
        for path in (run / "config.json", *(run / "eval").iterdir(), run / "environment.json"):
            path.write_text(content)
        (run / "metrics.jsonl").write_text('[]\n{"step": "x"}\n{"step": 1}\n')
        assert "2 of 3 lines of metrics.jsonl" in told(run)

    @pytest.mark.parametrize("stage", ["sft", "train", "evaluate"])
    def test_one_stage_alone(self, run, stage):
        file = run / "metrics.jsonl"
        lines = [line for line in file.read_text().splitlines() if f'"stage": "{stage}"' in line]
        file.write_text("\n".join(lines))
        for path in (run / "eval").glob("*"):
            if not path.name.startswith(stage):
                path.unlink()
        words = told(run)
        assert ("No evaluation with its questions" in words) == (stage == "sft")

    def test_only_begun(self, tmp_path):
        run = make_run(tmp_path / "run")
        shutil.rmtree(run / "eval")
        (run / "metrics.jsonl").write_text("")
        assert "reinforcement learning 0 of 3 steps · evaluation to come" in told(run)
        path = write_report([run])
        assert "Nothing to draw yet" in Page(path.read_text()).words

    @pytest.mark.parametrize(
        "start",
        [
            {"versions": {}, "machine": {}, "model": {"layers": 2}},
            {"versions": {}, "machine": {}, "model": {"layers": [], "parameters": "many"}},
            {"versions": {}, "machine": {}, "model": "small"},
            {"versions": 3, "machine": None},
        ],
    )
    def test_starts_that_lack_something(self, run, start):
        (run / "environment.json").write_text(json.dumps([start]))
        assert "tiny/model" in told(run)

    def test_stages_that_are_none(self, run):
        file = run / "metrics.jsonl"
        file.write_text(file.read_text() + '{"step": 6, "stage": ["train"]}\n')
        assert "1 of 8 lines of metrics.jsonl are cut or damaged" in told(run)
        for stages in (None, 3, "train"):
            config = json.loads((run / "config.json").read_text())
            config |= {"stages": stages, "num_steps": "three"}
            (run / "config.json").write_text(json.dumps(config))
            assert "3 steps" in told(run)

    def test_questions_with_images(self, run):
        """Files are named; what an earlier version left without text has its task's id."""
        images = [{"digest": "1f", "file": "data/a.png"}, {"digest": "2e", "file": "images/2e"}]
        for asked, said in (("How many?", "How many?"), (None, "bars:7")):
            records = [question("bars:7", response=FOUND) | {"question": asked, "images": images}]
            write_evaluation(run, "evaluate", 5, {"sampled": records})
            assert f"{said} images: data/a.png, images/2e accepted:" in told(run)

    @pytest.mark.parametrize(
        "fields",
        [
            {"answers": 5},
            {"images": 5, "question": 3},
            {"images": ["a.png", {"digest": "1f"}]},
            {"outcome": ["answered"]},
            {"answers": None, "searches": 2, "response": None, "exact_match": "yes"},
            {"sample_index": [1], "task_id": {}, "data_source": [], "final_answer": 3},
        ],
    )
    def test_questions_of_other_types(self, run, fields):
        for stage, step in (("train", 2), ("evaluate", 5)):
            questions = [{**question("a", response=FOUND), **fields}, *LAST]
            write_evaluation(run, stage, step, {"sampled": questions}, weights_step=[])
        assert "Where is a?" in told(run)

    def test_numbers_beyond_all_bounds(self, run):
        change_records(run, lambda r: r | {"critic/rewards/mean": 10**400, "actor/entropy": True})
        assert "finished" in told(run)

    def test_only_the_questions_that_are_shown_are_kept(self, run):
        write_evaluation(run, "train", 3, {"sampled": LAST, "greedy": FIRST})
        write_evaluation(run, "train", 4, {"sampled": LAST, "greedy": FIRST})
        kept = [list(found["questions"]) for found in read_run(run).evaluations]
        # First of each suite, and the last evaluation.
        assert kept == [["sampled"], ["greedy"], [], ["sampled", "empty_search"]]
        assert _facts(run).changes["became right"] == 2

    def test_what_a_killed_run_left_behind_is_not_its_own(self, run):
        write_evaluation(run, "train", 9, {"sampled": LAST})
        assert [e["step"] for e in read_run(run).evaluations] == [2, 5]


class TestCommand:
    def test_writes_where_it_is_told(self, run, tmp_path, capsys):
        main([str(run), f"--out={tmp_path / 'x' / 'page.html'}"])
        told = ["exact match: sampled 0.250 -> 0.750, search finds nothing 0.250"]
        assert capsys.readouterr().out.splitlines() == [*told, str(tmp_path / "x" / "page.html")]
        assert (tmp_path / "x" / "page.html").exists()
        assert (tmp_path / "x" / "page_plots" / "reward.png").exists()

    def test_pictures_are_those_of_the_page(self, run, tmp_path):
        for name in ("kl.png", "mine.png"):
            (run / "plots").mkdir(exist_ok=True)
            (run / "plots" / name).write_bytes(b"")
        write_report([run])
        own = {path.name: path.read_bytes() for path in (run / "plots").iterdir()}
        assert "mine.png" in own
        assert "kl.png" not in own  # a chart that is not drawn any more
        other = make_run(tmp_path / "other", rewards=(0.0, 0.0, 1.0))
        page = write_report([run, other], out=run / "compare.html")
        assert "compare_plots/*.png" in Page(page.read_text(encoding="utf-8")).words
        assert {path.name: path.read_bytes() for path in (run / "plots").iterdir()} == own
        assert not list(run.rglob(".*"))

    def test_what_nobody_thought_of_is_one_line(self, run, monkeypatch):
        monkeypatch.setattr("jaxrl.extras.report.reading.read_run", lambda _: 1 / 0)
        with pytest.raises(SystemExit, match=r"^error: no report of .*run: ZeroDivisionError"):
            main([str(run)])

    @pytest.mark.parametrize(("name", "wanted"), [("no", "there is no run"), ("", "is no run")])
    def test_no_such_run(self, tmp_path, name, wanted):
        with pytest.raises(SystemExit, match=f"^error: .*{wanted}"):
            main([str(tmp_path / name)])

    def test_what_the_system_refuses_says_what_to_do(self, run, tmp_path):
        page = tmp_path / "page.html"
        page.mkdir()
        with pytest.raises(SystemExit) as ended:
            main([str(run), f"--out={page}"])
        assert ended.value.code.startswith(f"error: {tmp_path}/")
        assert ended.value.code.endswith(
            "Is a directory; a file belongs there; move the folder away."
        )

    def test_a_run_ends_in_its_gain_and_the_report(self, run):
        said = []
        write_or_warn(run, said.append)
        gain = "exact match: sampled 0.250 -> 0.750, search finds nothing 0.250"
        assert said == [gain, f"report: {run / 'report.html'}"]

    def test_without_an_exact_match_the_parts_with_weight_are_told(self, tmp_path):
        run = make_run(tmp_path / "run")
        change_records(run, lambda r: {k: v for k, v in r.items() if "exact_match" not in k})
        for stage, step, brevity in (("train", 2, -0.5), ("evaluate", 5, 0.25)):
            means = {"brevity": brevity, "odd": 1.0}
            summary = {"greedy": {"all": means}}
            weights = {"greedy": {"brevity": 0.5, "odd": 0}}
            write_evaluation(run, stage, step, {}, summary=summary, reward_weights=weights)
        said = []
        write_or_warn(run, said.append)
        assert said[0] == "brevity: greedy -0.500 -> 0.250"

    def test_a_mistake_spoils_no_run(self, tmp_path):
        said = []
        write_or_warn(tmp_path / "none", said.append)
        [line] = said
        assert line.startswith("warning: no report: FileNotFoundError")
        assert f"python -m jaxrl.extras.report {tmp_path / 'none'} tries again" in line


TOTALS = {
    "ledger/total/trajectories": 1_234,
    "ledger/total/observation_tokens": 56_789,
    "ledger/total/sampled_tokens": 98_765,
    "ledger/total/calls/python": 3,
    "ledger/total/calls/search": 2_000,
    "perf/ledger/total/attempts/python": 3,
    "perf/ledger/total/attempts/search": 1_500,
    "perf/ledger/total/cost": 1.5,
    "perf/ledger/total/cache_hits": 500,
    "perf/ledger/total/shared": 0,
    "perf/ledger/total/failed": None,
    "timing_s/ledger/total/p50": 0.0123,
    "timing_s/ledger/total/p95": 1.25,
    "timing_s/ledger/total/max": 75.0,
}
MEASURES = {
    "searches": 1.5,
    "redundant_searches": 0.25,
    "answer_in_results": 0.75,
    "retrieved_but_ignored": 0.125,
    "right_without_evidence": 0.0,
}


class TestReward:
    def test_every_part_is_shown_before_and_after(self, run):
        """A function of the user's own, beside what is only measured."""
        weights = {"sampled": {"my_reward.brevity": 0.5, "exact_match": 0.0}}
        for stage, step, brevity in (("train", 2, -0.5), ("evaluate", 5, 0.25)):
            means = {"my_reward.brevity": brevity, "exact_match": brevity + 0.5}
            path = run / "eval" / f"{stage}_{step}.json"
            more = {"summary": {"sampled": {"all": means}}, "reward_weights": weights}
            path.write_text(json.dumps(json.loads(path.read_text()) | more))
        [brevity, exact] = facts_of(read_run(run)).parts
        assert (brevity.name, brevity.weight) == ("my_reward.brevity", 0.5)
        [(before, after)] = brevity.means.values()
        assert (before.value, after.value) == (-0.5, 0.25)
        assert (exact.name, exact.weight) == ("exact_match", 0.0)
        words = told(run)
        assert "Reward part weight sampled" in words
        assert "my_reward.brevity 0.5 -0.500 → 0.250 exact_match 0 0.000 → 0.750" in words

    @pytest.mark.parametrize("weights", [None, {"sampled": 3}, {"sampled": {"a": "x"}}, [1]])
    def test_weights_of_other_times_are_none(self, run, weights):
        path = run / "eval" / "evaluate_5.json"
        evaluation = json.loads(path.read_text()) | {"reward_weights": weights}
        path.write_text(json.dumps(evaluation))
        assert facts_of(read_run(run)).parts == []
        assert "Reward part" not in told(run)


class TestCosts:
    def test_the_newest_totals_are_told(self, tmp_path):
        make_run(tmp_path / "run")
        log = tmp_path / "run" / "metrics.jsonl"
        old = {name: 1 for name in TOTALS}
        records = [
            {"step": 4, "stage": "train", **old},
            {"step": 5, "stage": "train", **TOTALS},
        ]
        log.write_text(log.read_text() + "".join(json.dumps(r) + "\n" for r in records))
        costs = facts_of(read_run(tmp_path / "run")).costs
        assert costs.tools == {"python": (3, 3), "search": (2_000, 1_500)}
        assert costs.used == {"cost": 1.5, "answered by the cache": 500}
        assert costs.waits == {"p50": 0.0123, "p95": 1.25, "max": 75.0}
        words = " ".join(write_report([tmp_path / "run"]).read_text().split())
        assert "1,234 trajectories, evaluations included; 98,765 tokens sampled, 56,789 in" in words
        assert "Cost: 1.5; answered by the cache: 500. Calls waited 12 ms (median)" in words
        assert "12 ms (median), 1.25 s (95th percentile), 1 min 15 s at most." in words

    def test_where_answers_come_from_is_told_by_suite(self, tmp_path):
        make_run(tmp_path / "run")
        summary = {"sampled": {"all": MEASURES}, "greedy": {"all": {"searches": 1.0}}}
        path = tmp_path / "run" / "eval" / "evaluate_5.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"summary": summary}))
        found = facts_of(read_run(tmp_path / "run")).attribution
        assert found.keys() == {"sampled"}
        assert found["sampled"]["answer in the results"] == 0.75
        words = write_report([tmp_path / "run"]).read_text()
        assert 'in the results, and not answered</th><td class="n">0.125</td>' in words
        # An environment without an exact match does not say which answers are right.
        unjudged = MEASURES | dict.fromkeys(("retrieved_but_ignored", "right_without_evidence"))
        evaluation = json.loads(path.read_text()) | {"summary": {"sampled": {"all": unjudged}}}
        path.write_text(json.dumps(evaluation))
        words = write_report([tmp_path / "run"]).read_text()
        assert 'answer in the results</th><td class="n">0.750</td>' in words
        assert 'in the results, and not answered</th><td class="n">–</td>' in words

    def test_a_run_without_them(self, tmp_path):
        make_run(tmp_path / "run")
        facts = facts_of(read_run(tmp_path / "run"))
        assert (facts.costs, facts.attribution) == (None, {})
        assert "No costs were recorded." in write_report([tmp_path / "run"]).read_text()
