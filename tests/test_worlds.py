"""The benchmark of the methods' worlds: what it runs and what it reads of a run."""

import json
import math

import pytest

from benchmarks import worlds
from benchmarks.claims_runs import ROOT, Job
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
        record = {"summary": {"sampled": {"all": {"exact_match": score}}}}
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

    def run(job, core, cache):
        begun.append((job.module, job.arguments, core, cache))
        if job.module == "jaxrl.launch":
            write_run(job.folder, [-0.5], {"train_1": 0.25, "evaluate_2": 0.5})

    monkeypatch.setattr(Job, "run", run)
    worlds.main([f"--world={name}", "--seeds=4,7", f"--workdir={tmp_path}"])
    world, made = worlds.WORLDS[name], tmp_path / name / "world_4"
    assert begun[0] == (world.builder, (f"--out={made}", "--seed=4"), None, None)
    assert begun[1][1][0] == f"--config={ROOT / world.config}:{made}"
    assert (ROOT / world.config).is_file()
    assert len(begun) == 4
    written = json.loads((tmp_path / name / "results.json").read_text())
    assert written.keys() == {"4", "7"}
    assert all(acted.name in written["4"] for acted in world.acted)
