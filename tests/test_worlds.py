"""The benchmark of the methods' worlds: what it runs and what it reads of a run."""

import json
import math

import pytest

from benchmarks import worlds
from benchmarks.jobs import ROOT, Job
from benchmarks.worlds import Acted, World, first, halfway, last

WORLD = World(
    builder="examples.quickstart_world",
    config="configs/quickstart.py",
    acted=(
        Acted(name="overlong, all steps", metric="reward/overlong/mean", of=sum),
        Acted(name="never there", metric="reward/nothing/mean", of=max),
    ),
)


def write_run(folder, penalties, scores):
    """A workdir with a penalty of each training step, and evaluations of one suite."""
    (folder / "eval").mkdir(parents=True)
    lines = [{"step": 1, "stage": "sft"}, {"step": 1, "stage": "train", "val-core/x": 0.5}]
    lines += [
        {"step": 2 + i, "stage": "train", "actor/num_updates": i, "reward/overlong/mean": value}
        for i, value in enumerate(penalties)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, score in scores.items():
        record = {
            "summary": {"sampled": {"all": {"exact_match": score}}},
            "questions": {"sampled": [{"task_id": "a", "exact_match": score}]},
        }
        (folder / "eval" / f"{name}.json").write_text(json.dumps(record))
    (folder / "finished.json").write_text(json.dumps({"seconds": 12.5}))


def test_figures_are_read_from_a_run(tmp_path):
    scores = {"train_1": 0.25, "train_11": 0.5, "train_9": 0.4, "evaluate_11": 0.75}
    write_run(tmp_path, [-0.5, None, -0.25], scores)
    got = worlds.read_figures(WORLD, tmp_path)
    assert got["exact_match, sampled, before"] == 0.25
    assert got["exact_match, sampled, after"] == 0.75
    assert math.isnan(got["exact_match, greedy, after"])
    assert got["overlong, all steps"] == -0.75
    assert math.isnan(got["never there"])
    assert got["wall s"] == 12.5
    text = worlds.as_table({3: got})
    assert "| 3 | 0.250 | 0.750 | – | – | −0.750 | – | 12.5 |" in text


def samples(scores):
    return {"sampled": [{"task_id": name, "exact_match": score} for name, score in scores]}


def test_a_gain_is_that_of_the_same_questions(tmp_path):
    """Hand-worked: 12 of 16 questions gain 1 and 4 lose 1, whatever order they were asked in."""
    names = [f"q{i:02}" for i in range(16)]
    before = [(name, float(i >= 12)) for i, name in enumerate(names)]
    after = [(name, float(i < 12)) for i, name in enumerate(names)][::-1]
    records = [{"questions": samples(scores)} for scores in (before, after)]
    mean, low, high = worlds.gain(*records, "sampled", "exact_match")
    assert mean == 0.5
    # In a resample n gain, binomial of 16 and 3 in 4: its 2.5% and 97.5% quantiles are 8 and 15.
    assert (low, high) == (2 * 8 / 16 - 1, 2 * 15 / 16 - 1)
    # Two samples of one question are one value of that question.
    records[0]["questions"]["sampled"] += samples([("q00", 1.0)])["sampled"]
    assert worlds.gain(*records, "sampled", "exact_match")[0] == (0.5 * 16 - 0.5) / 16
    records[1]["questions"]["sampled"].pop()
    with pytest.raises(ValueError, match="asked different questions"):
        worlds.gain(*records, "sampled", "exact_match")


def test_evaluations_of_the_last_step_count_as_one(tmp_path):
    write_run(tmp_path, [0.0], {"train_1": 0.25, "train_4": 0.75})
    controls = {"summary": {"empty_search": {"all": {"exact_match": 0.0}}}}
    (tmp_path / "eval" / "evaluate_4.json").write_text(json.dumps(controls))
    before, after = worlds.evaluations(tmp_path)
    assert worlds.value_of(before, "sampled", "exact_match") == 0.25
    assert worlds.value_of(after, "sampled", "exact_match") == 0.75
    assert worlds.value_of(after, "empty_search", "exact_match") == 0.0


def test_a_run_that_did_not_train_is_refused(tmp_path):
    write_run(tmp_path, [0.0], {"train_1": 0.25})
    with pytest.raises(FileNotFoundError, match="holds 1 evaluations; expected one before"):
        worlds.read_figures(WORLD, tmp_path)


def test_the_first_and_the_last_fifth_by_hand():
    assert (first(range(10)), last(range(10))) == (0.5, 8.5)
    assert (first([7]), halfway([7]), last([7])) == (7, 7, 7)
    assert (halfway(range(10)), halfway(range(4))) == (3.5, 1)


@pytest.mark.parametrize("name", worlds.WORLDS)
def test_a_world_runs_what_a_user_would(name, tmp_path, monkeypatch):
    """The builder, then the shipped configuration with the world's folder; the table at the end."""
    begun = []

    def run(job, cache):
        begun.append((job.module, job.arguments, cache))
        if job.module == "jaxrl.launch":
            write_run(job.folder, [-0.5], {"train_1": 0.25, "evaluate_2": 0.5})

    monkeypatch.setattr(Job, "run", run)
    worlds.main([f"--world={name}", "--seeds=4,7", f"--workdir={tmp_path}"])
    world, made = worlds.WORLDS[name], tmp_path / name / "world_4"
    assert begun[0] == (world.builder, (f"--out={made}", "--seed=4"), None)
    assert begun[1][1][0] == f"--config={ROOT / world.config}:{made}"
    assert (ROOT / world.config).is_file()
    assert len(begun) == 4
    written = json.loads((tmp_path / name / "results.json").read_text())
    assert written.keys() == {"4", "7"}
    assert all(acted.name in written["4"] for acted in world.acted)
