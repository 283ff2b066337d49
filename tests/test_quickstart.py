"""The quickstart learns, with every seed, and what it learned is to search."""

import json
import subprocess
import sys

import pytest


def exact_match(workdir, name, suite):
    results = json.loads((workdir / "eval" / f"{name}.json").read_text(encoding="utf-8"))
    return results["summary"][suite]["all"]["exact_match"]


def check_run(workdir):
    assert exact_match(workdir, "train_900", "sampled") < 0.35
    assert exact_match(workdir, "train_960", "sampled") >= 0.85
    assert exact_match(workdir, "train_960", "greedy") >= 0.95
    assert exact_match(workdir, "evaluate_960", "empty_search") < 0.1
    lines = (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record for record in map(json.loads, lines) if "actor/pg_loss" in record]
    assert len(steps) == 60
    assert max(step["rollout_corr/logprob_diff_max"] for step in steps) < 1e-4
    assert {step["perf/num_compilations/update"] for step in steps} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_quickstart_reaches_its_figures(tmp_path, seed):
    world, workdir = tmp_path / "world", tmp_path / "run"
    make = ["examples.quickstart_world", f"--out={world}", f"--seed={seed}"]
    train = [
        "jaxrl.launch",
        f"--config=configs/quickstart.py:{world}",
        f"--config.seed={seed}",
        f"--workdir={workdir}",
    ]
    for module, *arguments in (make, train):
        subprocess.run([sys.executable, "-m", module, *arguments], check=True)
    check_run(workdir)
