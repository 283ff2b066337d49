"""The claims' benchmark: what it measures, how it judges, what it writes, and that it resumes."""

import ast
import dataclasses
import json
import math
import sys

import pytest

from benchmarks import claims, claims_config, claims_report, claims_runs
from benchmarks.claims_report import Claim, Criterion, Finding, Measure, Panel
from benchmarks.claims_runs import Job, Record
from jaxrl.config import default_config, flatten
from jaxrl.config_checks import validate


def answer(task, *, right=False, source="one_hop", outcome="answered", tokens=10, searches=1):
    return {
        "task_id": task,
        "data_source": source,
        "outcome": outcome,
        "exact_match": float(right),
        "num_sampled": tokens,
        "searches": ["query"] * searches,
    }


def test_measures_by_hand():
    answers = [
        answer("a", right=True, tokens=10),
        answer("a", tokens=20),
        answer("b", source="four_hop", tokens=60, searches=4, outcome="out_of_budget"),
        answer("b", source="four_hop", tokens=50, searches=3),
        answer("b", source="four_hop", outcome="environment_error"),
    ]
    got = claims_runs.measure(answers)
    assert got["all/exact_match"] == 1 / 4
    assert got["one_hop/exact_match"] == 1 / 2
    assert got["all/tokens"] == 35
    assert got["four_hop/tokens"] == 55
    assert got["four_hop/searches"] == 3.5
    assert got["all/truncated"] == 1 / 4
    # Of two samples one is right: any two hold it, one does in half of the cases.
    assert (got["one_hop/pass@1"], got["one_hop/pass@2"]) == (1 / 2, 1)
    assert (got["all/pass@1"], got["all/pass@2"]) == (1 / 4, 1 / 2)
    assert "all/pass@4" not in got
    assert "reliability" not in got


def test_reliability_by_hand():
    # Six questions, two of which nothing answers. Declined: one of each sort. Right: two of four.
    answers = [
        answer("a", right=True),
        answer("b", right=True),
        answer("c"),
        answer("d", outcome="abstained"),
        answer("e", source="unknown_person", outcome="abstained"),
        answer("f", source="untold_fact"),
    ]
    got = claims_runs.measure(answers)
    assert got["precision"] == 2 / 4
    assert got["reliability"] == pytest.approx((1 - 2 / 6) * 2 / 4 + 2 / 6 * 2 / 6)
    assert got["answerable/exact_match"] == 2 / 4
    assert got["answerable/abstained"] == 1 / 4
    assert got["unanswerable/abstained"] == 1 / 2


def test_one_who_always_declines_is_not_reliable():
    answers = [answer("a", outcome="abstained"), answer("b", source="untold_fact")]
    answers[1]["outcome"] = "abstained"
    got = claims_runs.measure(answers)
    assert (got["precision"], got["reliability"]) == (0, 0)


def write_run(folder, rewards, scores, first_step=0):
    """A workdir with metrics of each step, and an evaluation of one question after some."""
    (folder / "eval").mkdir(parents=True)
    records = [{"step": first_step, "stage": "train", "val-core/all/exact_match/mean@1": 0.5}]
    records += [
        {"step": step, "stage": "train", "actor/num_updates": step, "critic/rewards/mean": reward}
        for step, reward in enumerate(rewards, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    for step, right in scores.items():
        content = {"questions": {"sampled": [answer("a", right=right)]}}
        (folder / "eval" / f"train_{step}.json").write_text(json.dumps(content))


def test_a_record_is_read_from_a_workdir(tmp_path):
    write_run(tmp_path, [0.25, 0.5, None], {0: False, 3: True})
    record = claims_runs.read_record(tmp_path)
    assert record.steps["critic/rewards/mean"] == [(1, 0.25), (2, 0.5)]
    assert {step: m["all/exact_match"] for step, m in record.evaluations.items()} == {0: 0, 3: 1}
    assert record.final["all/exact_match"] == 1


def test_a_run_that_went_on_counts_on(tmp_path):
    write_run(tmp_path / "first", [0.1, 0.2], {0: False, 2: True})
    write_run(tmp_path / "second", [0.3], {0: True, 1: False})
    first = claims_runs.read_record(tmp_path / "first")
    record = claims_runs.read_record(tmp_path / "second", before=first)
    assert record.steps["critic/rewards/mean"] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert list(record.evaluations) == [0, 2, 3]
    assert record.final["all/exact_match"] == 0
    assert first.steps["critic/rewards/mean"] == [(1, 0.1), (2, 0.2)]


def test_the_last_evaluation_may_be_a_run_of_its_own(tmp_path):
    write_run(tmp_path / "run", [0.1], {0: False, 1: False})
    (tmp_path / "held_out" / "eval").mkdir(parents=True)
    content = {"questions": {"sampled": [answer("z", right=True)]}}
    (tmp_path / "held_out" / "eval" / "evaluate_0.json").write_text(json.dumps(content))
    record = claims_runs.read_record(tmp_path / "run", held_out=tmp_path / "held_out")
    assert record.final["all/exact_match"] == 1
    assert record.evaluations[1]["all/exact_match"] == 0


def scored(*values):
    """Records whose one measure has these values."""
    return [Record(final={"score": value}) for value in values]


SCORE = Measure(name="score", of=claims_report.final("score"))


def judged(ours, theirs, **settings):
    usual = {"measure": SCORE, "arm": "new", "baseline": "old", "is_higher_better": True}
    criterion = Criterion(**{**usual, **settings})
    return claims_report.judge(criterion, {"new": scored(*ours), "old": scored(*theirs)})


def test_a_difference_against_its_standard_error():
    # Variances 0.01 and 0.04 of three each: the standard error is sqrt(0.05 / 3) = 0.1291.
    old, new = [0.2, 0.4, 0.6], [0.6, 0.7, 0.8]
    finding = judged(new, old)
    assert finding.difference == pytest.approx(0.3)
    assert finding.standard_error == pytest.approx(0.129099, abs=1e-6)
    assert finding.result == "shows"
    assert judged([x - 0.05 for x in new], old).result == "not shown"  # 0.25 < 2 * 0.129
    assert judged(new, old, is_higher_better=False).result == "reversed"
    assert judged(old, new, is_higher_better=False).result == "shows"
    assert judged(new, old, least=0.31).result == "not shown"
    assert judged(old, old).result == "not shown"


def test_a_condition_allows_a_little():
    old = [0.8, 0.8, 0.8]
    assert judged([0.76] * 3, old, allowance=0.05).result == "holds"
    assert judged([0.95] * 3, old, allowance=0.05).result == "holds"
    assert judged([0.74] * 3, old, allowance=0.05).result == "fails"
    assert judged([0.84] * 3, old, allowance=0.05, is_higher_better=False).result == "holds"


def test_what_is_never_reached_is_worst():
    lower = {"is_higher_better": False}
    assert judged([20, 30, 25], [40, math.inf, 50], **lower).result == "shows"
    assert judged([20, math.inf, 25], [40, 45, 50], **lower).result == "reversed"
    assert judged([math.inf] * 3, [math.inf] * 3, **lower).result == "not shown"
    assert judged([math.nan], [1.0]).result == "not measured"


def finding(result, allowance=None):
    criterion = Criterion(
        measure=SCORE, arm="new", baseline="old", is_higher_better=True, allowance=allowance
    )
    return Finding(criterion=criterion, difference=0.0, standard_error=0.0, result=result)


@pytest.mark.parametrize(
    ("gains", "conditions", "verdict"),
    [
        (["shows"], [], "shows"),
        (["shows", "shows"], ["holds"], "shows"),
        (["shows"], ["fails"], "mixed"),
        (["shows", "not shown"], ["holds"], "mixed"),
        (["shows", "reversed"], [], "mixed"),
        (["not shown"], ["holds"], "does not show"),
        (["reversed"], [], "does not show"),
    ],
)
def test_verdicts(gains, conditions, verdict):
    findings = [finding(r) for r in gains] + [finding(r, allowance=0.05) for r in conditions]
    assert claims_report.verdict(findings) == verdict


def test_steps_to_a_threshold():
    scores = {0: 0.2, 10: 0.4, 20: 0.8, 30: 0.6}
    record = Record(
        evaluations={step: {"score": value} for step, value in scores.items()},
        steps={"generated": [(step, 100.0) for step in range(1, 31)]},
    )
    steps = claims_report.steps_to("score", 0.5)
    assert steps(record) == pytest.approx(12.5)
    assert claims_report.total_until("generated", steps)(record) == pytest.approx(1250)
    assert claims_report.steps_to("score", 0.1)(record) == 0
    never = claims_report.steps_to("score", 0.9)
    assert math.isinf(never(record))
    assert math.isinf(claims_report.total_until("generated", never)(record))


def test_metrics_of_the_last_steps():
    record = Record(steps={"entropy": [(step, float(step)) for step in range(1, 10)]})
    assert claims_report.last_steps("entropy")(record) == 8  # of 7, 8, 9
    assert claims_report.last_steps("entropy", 1.0)(record) == 5
    assert claims_report.total("entropy")(record) == 45
    assert math.isnan(claims_report.last_steps("absent")(record))


def test_spreads():
    assert claims_report.spread([0.1, 0.2, 0.3], 3) == "0.200 ± 0.100"
    assert claims_report.spread([1234.0], 0) == "1,234 ± 0"
    assert claims_report.spread([20.0, math.inf, 25.0], 1) == "20.0 at best; 1 of 3 never"
    assert claims_report.spread([math.inf], 1) == "1 of 1 never"
    assert claims_report.spread([math.nan, 1.0], 1) == "–"


def test_curves_average_over_steps_and_seeds():
    record = Record(steps={"entropy": [(1, 1.0), (2, 2.0), (3, 6.0), (4, math.nan)]})
    panel = Panel(title="", metric="entropy", window=2)
    assert claims_report.curve(panel, record) == [(1, 1.0), (2, 1.5), (3, 4.0)]


def toy_claim():
    return Claim(
        name="toy",
        title="Toy",
        says="New scores higher.",
        world="somewhere",
        arms=("old", "new"),
        measures=(SCORE,),
        criteria=(
            Criterion(measure=SCORE, arm="new", baseline="old", is_higher_better=True, least=0.1),
        ),
        panels=(Panel(title="score", measure="score"),),
    )


def toy_arms():
    def record(*values):
        evaluations = {step: {"score": value} for step, value in enumerate(values)}
        return Record(evaluations=evaluations, final=evaluations[len(values) - 1])

    return {
        "old": [record(0.1, 0.2), record(0.1, 0.3)],
        "new": [record(0.1, 0.8), record(0.1, 0.9)],
    }


def test_a_section_tells_verdict_numbers_and_picture():
    text = claims_report.section(toy_claim(), toy_arms(), "images/toy.svg")
    assert text.startswith("## Toy: shows\n\nNew scores higher.")
    assert "| new | 0.850 ± 0.071 |" in text
    assert "| score of new: higher | old | 0.600 | 0.071 | 0.1 | shows |" in text
    assert "](images/toy.svg)" in text
    row = claims_report.summary_row(toy_claim(), toy_arms())
    assert row == "| Toy | **shows** | score of new 0.600: shows |"


def test_the_page_keeps_what_it_says_of_other_claims(tmp_path, monkeypatch):
    toy, other = toy_claim(), dataclasses.replace(toy_claim(), name="other", title="Other")
    arm = claims.Arm(world="somewhere", num_steps=3)
    monkeypatch.setattr(claims, "CLAIMS", (toy, other))
    monkeypatch.setattr(claims, "ARMS", {"somewhere": {"old": arm, "new": arm}})
    results = {"somewhere": toy_arms()}
    first = claims.page(layout(tmp_path), [other], results, "")
    assert "## Toy: " not in first
    first += f"{claims.OWN_WORLDS}\nSomething.\n"
    whole = claims.page(layout(tmp_path), [toy], results, first)
    places = [whole.index(f"## {title}: shows") for title in ("Toy", "Other")]
    assert places == sorted(places)
    assert whole.count("| somewhere | old | 3 | – |") == 1
    assert whole.endswith(f"{claims.OWN_WORLDS}\nSomething.\n")
    assert claims.page(layout(tmp_path), [], {}, whole) == whole
    assert claims.page(layout(tmp_path), [other], results, whole) == whole


def test_pictures_are_the_same_bytes_again(tmp_path):
    for name in ("first", "again"):
        claims_report.draw(toy_claim(), toy_arms(), tmp_path / f"{name}.svg")
    first, again = ((tmp_path / f"{name}.svg").read_bytes() for name in ("first", "again"))
    assert first == again
    assert first.startswith(b"<?xml")
    assert b">new<" in first


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that appends its arguments to a file and fails when told to."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "appends.py").write_text(
        "import sys\n"
        "if sys.argv[2] == 'fail': sys.exit('no')\n"
        "open(sys.argv[1], 'a').write(sys.argv[2] + ' ')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return "appends"


def run(jobs, tmp_path, num_workers=2):
    said = []
    claims_runs.run_jobs(jobs, num_workers=num_workers, cache=tmp_path / "cache", log=said.append)
    return said


def test_jobs_run_after_what_they_need_and_only_once(tmp_path, module):
    log = tmp_path / "log"
    first, second = tmp_path / "first", tmp_path / "second"
    jobs = [
        Job(folder=second, module=module, arguments=(str(log), "two"), needs=(first,)),
        Job(folder=first, module=module, arguments=(str(log), "one")),
    ]
    run(jobs, tmp_path)
    assert log.read_text() == "one two "
    assert run(jobs, tmp_path) == ["2 of 2 jobs are done"]
    assert log.read_text() == "one two "
    assert claims_runs.seconds_of(first) > 0


def test_other_arguments_begin_anew_and_the_same_go_on(tmp_path, module):
    log, folder = tmp_path / "log", tmp_path / "job"
    run([Job(folder=folder, module=module, arguments=(str(log), "one"))], tmp_path)
    (folder / "kept").write_text("")
    (folder / claims_runs.FINISHED).unlink()  # as if it had been killed
    run([Job(folder=folder, module=module, arguments=(str(log), "one"))], tmp_path)
    assert (folder / "kept").exists()
    run([Job(folder=folder, module=module, arguments=(str(log), "other"))], tmp_path)
    assert not (folder / "kept").exists()
    assert log.read_text() == "one one other "


def test_what_is_made_of_something_is_made_again_after_it(tmp_path, module):
    log = tmp_path / "log"
    folders = [tmp_path / name for name in ("world", "start", "run")]

    def jobs(word):
        return [
            Job(folder=folders[0], module=module, arguments=(str(log), word)),
            Job(folder=folders[1], module=module, arguments=(str(log), "2"), needs=(folders[0],)),
            Job(folder=folders[2], module=module, arguments=(str(log), "3"), needs=(folders[1],)),
        ]

    run(jobs("1"), tmp_path)
    run(jobs("1"), tmp_path)
    assert log.read_text() == "1 2 3 "
    assert run(jobs("other"), tmp_path)[0] == "0 of 3 jobs are done"
    assert log.read_text() == "1 2 3 other 2 3 "


def test_a_job_that_fails_is_told(tmp_path, module):
    log, folder = tmp_path / "log", tmp_path / "job"
    after = Job(
        folder=tmp_path / "after", module=module, arguments=(str(log), "x"), needs=(folder,)
    )
    jobs = [Job(folder=folder, module=module, arguments=(str(log), "fail")), after]
    with pytest.raises(RuntimeError, match="appends ended with 1; its output is in"):
        run(jobs, tmp_path)
    assert (folder / claims_runs.OUTPUT).read_text().strip() == "no"
    assert not log.exists()


def test_a_missing_need_is_told(tmp_path, module):
    job = Job(folder=tmp_path / "job", module=module, arguments=(), needs=(tmp_path / "absent",))
    with pytest.raises(RuntimeError, match="which none make"):
        run([job], tmp_path)


def layout(tmp_path, **settings):
    usual = {"out": tmp_path, "seeds": (0, 1, 2), "questions": "eval", "is_quick": False}
    return claims.Layout(**{**usual, **settings})


def test_arms_and_claims_fit_together():
    for claim in claims.CLAIMS:
        assert set(claim.arms) <= set(claims.ARMS[claim.world])
        assert claim.arms[0].startswith(claims.PLAIN)
        for criterion in claim.criteria:
            assert criterion.arm in claim.arms[1:]
            assert criterion.baseline == claim.arms[0]
        assert any(criterion.allowance is None for criterion in claim.criteria)
    named = {(claim.world, arm) for claim in claims.CLAIMS for arm in claim.arms}
    assert named == {(world, arm) for world, arms in claims.ARMS.items() for arm in arms}


def test_a_claim_goes_without_arms_that_decide_nothing():
    [claim] = [claim for claim in claims.CLAIMS if claim.name == "bapo"]
    run = {"GRPO": [], "BAPO": []}
    assert claims.with_arms(claim, run).arms == ("GRPO", "BAPO")
    assert claims.with_arms(claim, {**run, "BAPO, with stages": []}) == claim
    assert claims.with_arms(claim, {"GRPO": [], "BAPO, with stages": []}) is None


def test_every_setting_is_a_key_of_the_configuration():
    known = set(flatten(default_config()))
    for arms in claims.ARMS.values():
        for arm in arms.values():
            assert set(arm.changes) <= known
    assert set(claims.QUICK_RUN) <= known


def configured(job):
    """The configuration that a job of `jaxrl.launch` runs."""
    [world] = [a.rpartition(":")[2] for a in job.arguments if a.startswith("--config=")]
    config = claims_config.get_config(world)
    defaults = flatten(config)
    for argument in job.arguments:
        key, _, value = argument.removeprefix("--config.").partition("=")
        if key in defaults:
            kind = type(defaults[key])
            value = value if kind is str else kind(ast.literal_eval(value))
            config.update_from_flattened_dict({key: value})
    return config


@pytest.mark.parametrize("is_quick", [False, True])
def test_no_run_is_refused(tmp_path, is_quick):
    jobs = claims.all_jobs(layout(tmp_path, seeds=(0,), is_quick=is_quick), claims.CLAIMS)
    runs = [job for job in jobs if job.module == "jaxrl.launch"]
    assert len(runs) > len(claims.CLAIMS)
    for job in runs:
        validate(configured(job))


def test_folders_are_distinct_and_everything_needed_is_made(tmp_path):
    jobs = claims.all_jobs(layout(tmp_path), claims.CLAIMS)
    folders = [job.folder for job in jobs]
    assert len(set(folders)) == len(folders)
    assert {need for job in jobs for need in job.needs} <= set(folders)


def test_runs_look_at_evaluation_questions_last_or_not_while_they_train(tmp_path):
    for job in claims.all_jobs(layout(tmp_path), claims.CLAIMS):
        sources = [a for a in job.arguments if a.startswith("--config.tasks.eval.source=")]
        if "runs" in job.folder.parts and job.folder.parts[-3] == "unanswerable":
            is_last = job.folder.name.endswith("held_out")
            assert sources[0].endswith("questions_eval.jsonl" if is_last else "questions_dev.jsonl")
    for job in claims.all_jobs(layout(tmp_path, questions="dev"), claims.CLAIMS):
        assert not any("questions_eval" in argument for argument in job.arguments)


def test_what_is_not_the_benchmark_s_stays_on_the_page(tmp_path):
    layout = claims.Layout(out=tmp_path, seeds=(0,), questions="dev", is_quick=True)
    own = f"{claims.OWN_WORLDS}\nA table.\n"
    for text in (own, f"# Old\n\n## Verdicts\n{own}"):
        (tmp_path / "results.md").write_text(text, encoding="utf-8")
        claims.write_results(layout, (), tmp_path)
        written = (tmp_path / "results.md").read_text(encoding="utf-8")
        assert written.startswith("# What the claims come to")
        assert written.endswith(own)
        assert "Old" not in written


@pytest.mark.slow(instead="test_claims.py::test_jobs_run_after_what_they_need_and_only_once")
def test_the_whole_benchmark_at_its_smallest(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["claims"])
    arguments = ["--quick", f"--out={tmp_path}", "--seeds=2"]
    claims.main(arguments)
    docs = tmp_path / "docs"
    text = (docs / "results.md").read_text(encoding="utf-8")
    assert text.count("\n## ") == len(claims.CLAIMS) + 2
    for claim in claims.CLAIMS:
        assert (docs / "images" / f"results_{claim.name}.svg").exists()
        assert f"## {claim.title}: " in text
    capsys.readouterr()
    claims.main(arguments)
    num_jobs = len(claims.all_jobs(layout(tmp_path, seeds=(0, 1)), claims.CLAIMS))
    assert f"{num_jobs} of {num_jobs} jobs are done" in capsys.readouterr().out
