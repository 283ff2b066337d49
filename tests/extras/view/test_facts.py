"""Facts about runs, with hand-worked numbers."""

import pytest

from jaxrl.extras.view import facts
from jaxrl.extras.view.responses import classify_failure, split_response
from tests.extras.view.workdirs import (
    FIRST,
    FOUND,
    LAST,
    change_records,
    make_run,
    question,
    step_file,
    trajectory,
    view,
    write_lines,
)


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def read(run):
    [reader] = view(run).runs
    return reader


def keep_records(run, end):
    """Keep the records of metrics.jsonl before index `end`, as if the run had been killed."""
    path = run / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:end]))


def points_of(run):
    """Return step, value and interval of every score, by suite, data set and measure."""
    return {
        (row["suite"], row["data_set"], row["measure"]): [point[:4] for point in row["points"]]
        for row in facts.compute_scores(read(run))
    }


class TestScores:
    def test_before_and_after_with_intervals(self, run):
        assert points_of(run) == {
            ("sampled", "all", "exact_match"): [(2, 0.25, 0.125, 0.375), (5, 0.75, 0.625, 0.875)],
            ("empty_search", "all", "exact_match"): [(5, 0.25, 0.125, 0.375)],
        }


class TestAnswers:
    @pytest.mark.parametrize(
        ("kind", "fields"),
        [
            (None, {"right": 1.0}),
            ("environment_error", {"right": 1.0, "outcome": "environment_error"}),
            ("malformed", {"outcome": "malformed"}),
            ("no_search", {"response": "<answer> Oslo </answer>"}),
            ("found", {"response": FOUND}),
            ("not_found", {"response": FOUND, "answers": ["Tar"]}),  # only part of a word
            # A result that the model wrote is no evidence.
            ("no_search", {"response": "<information>Tarvik</information>"}),
        ],
    )
    def test_kinds_of_failure(self, kind, fields):
        assert classify_failure(question("a", **fields)) == kind

    def test_answers_of_the_first_and_the_last_evaluation(self, run):
        viewer = view(run)
        rows = viewer.respond("answers/0/0")
        verdicts = {row["task_id"]: (row["before"]["is_right"], row["is_right"]) for row in rows}
        a, b, c, d = (False, True), (True, True), (False, True), (False, False)
        assert verdicts == {"a": a, "b": b, "c": c, "d": d}
        before, after = (viewer.respond(address) for address in rows[0]["addresses"])
        assert before["segments"] == [["answer", "Oslo"]]
        assert after["segments"][-1] == ["answer", "Tarvik"]
        # A suite that was evaluated once has nothing before.
        [row, *_] = viewer.respond("answers/0/1")
        assert (row["before"], len(row["addresses"])) == (None, 1)

    def test_responses_are_split_by_their_tags(self):
        assert split_response(f"<think> t </think>{FOUND}so <answer> x </answer>") == [
            ("think", "t"),
            ("search", "q"),
            ("information", "Doc 1(Title: X) born in Tarvik."),
            ("text", "\n\nso "),
            ("answer", "x"),
        ]
        assert split_response("<think> a <search> b") == [("think", "a"), ("search", "b")]
        assert split_response("<information>x</information>") == [("forged", "x")]


class TestProgress:
    def test_an_unfinished_run(self, run):
        rows = [(row["num_done"], row["num_planned"]) for row in facts.compute_progress(read(run))]
        assert rows == [(2, 2), (3, 3), (1, 1)]
        assert facts.is_finished(read(run))
        keep_records(run, -2)
        assert not facts.is_finished(read(run))


class TestWarnings:
    def test_steps_without_effect_are_warnings(self, run):
        assert facts.find_warnings(read(run)) == []

        def spoil(record):
            if record["step"] < 3 or record["stage"] != "train":
                return record
            failed = float(record["step"] == 3)
            more = {"rollout/informative_share": 0.0, "actor/num_learned": 0}
            return record | more | {"outcome/environment_error": failed}

        change_records(run, spoil)
        turns = [{"error": None}, {"error": "no <host>"}]
        failed = trajectory(outcome="environment_error", turns=turns)
        write_lines(step_file(run, 3), [trajectory(), failed])
        assert facts.find_warnings(read(run)) == [
            (True, "nothing learned: every gradient was zero"),
            (False, "1 of 3 steps had no effect: every episode failed"),
            (True, "2 of 3 steps had no effect: all compared rewards were equal"),
            (True, "an environment error: no <host>"),
        ]


class TestComparison:
    def test_groups_are_runs_that_differ_only_in_the_seed(self, tmp_path):
        changes = ({"seed": 1}, {"kl.coef": 0.1}, {"seed": 2})
        runs = [make_run(tmp_path / str(i), **settings) for i, settings in enumerate(changes)]
        readers = view(*runs).runs
        groups = [(group["runs"], group["settings"]) for group in facts.group_runs(readers)]
        assert groups == [([0, 2], ["kl.coef=0.0"]), ([1], ["kl.coef=0.1"])]
        assert len(facts.group_runs(readers, ["kl"])) == 1
        assert len(facts.group_runs(readers, ["kl.coe"])) == 2
        # Without a configuration nothing is known to be the same.
        for run in runs:
            (run / "config.json").unlink()
        assert len(facts.group_runs(view(*runs).runs)) == 3

    def test_environments_are_compared_key_by_key(self, tmp_path):
        changes = [
            {"environments": {"a": {"weight": w}, "b": {"env.name": "math"}}} for w in (1, 2)
        ]
        runs = [make_run(tmp_path / str(i), **settings) for i, settings in enumerate(changes)]
        readers = view(*runs).runs
        settings = [group["settings"] for group in facts.group_runs(readers)]
        assert settings == [["environments.a.weight=1"], ["environments.a.weight=2"]]
        rows = {
            key: (value, changed) for key, value, _, changed in facts.list_config_rows(readers[0])
        }
        assert rows["environments.b.env.name"] == ("math", True)

    def test_means_are_over_the_finished_seeds(self, tmp_path):
        # Three of four, two of four, and one that was killed on the way.
        lasts = (LAST, FIRST[:1] + LAST[1:3] + FIRST[3:], LAST)
        runs = [
            make_run(tmp_path / f"s{seed}", seed=seed, last=last) for seed, last in enumerate(lasts)
        ]
        keep_records(runs[2], 5)
        *_, killed, mean = view(*runs).respond("overview")["comparison"]["rows"]
        assert killed["cells"][1] == ["2", "not finished"]
        # 0.75 and 0.5: the deviation is 0.25 / √2.
        assert (mean["run"], mean["cells"][2]) == (
            None,
            ["0.250 ± 0.000 → 0.625 ± 0.177", "of 2 finished"],
        )
