"""The table of a run on real documents, read from evaluations written by hand."""

import json

import pytest

from benchmarks import real

STEP = {"stage": "train", "actor/num_updates": 1, "timing_s/step": 50.0}


def write_evaluation(run, name, **scores):
    (run / "eval").mkdir(parents=True, exist_ok=True)
    record = {
        "summary": {suite: {"all": {"exact_match": score}} for suite, score in scores.items()},
        "intervals": {
            suite: {"all": {"exact_match": [0.0, score]}} for suite, score in scores.items()
        },
        "questions": {
            suite: [{"task_id": "a", "exact_match": score}] for suite, score in scores.items()
        },
    }
    (run / "eval" / f"{name}.json").write_text(json.dumps(record))


def test_the_table_by_hand(tmp_path):
    run = tmp_path / "real"
    write_evaluation(tmp_path / "real_as_it_is", "evaluate_0", sampled=0.0, greedy=0.125)
    write_evaluation(run, "train_9", sampled=0.25, greedy=0.5)  # 9 before 11
    write_evaluation(run, "train_11", sampled=0.5, greedy=0.75)
    with pytest.raises(FileNotFoundError, match=r"hold 3 evaluations; .* Run `make real`"):
        real.report(run)
    write_evaluation(run, "evaluate_11", empty_search=0.0625, random_search=0.03)
    steps = [
        STEP | {"step": 10, "reward/exact_match/mean": 0.25, "rollout_corr/logprob_diff_max": 1e-5},
        STEP | {"step": 11, "reward/exact_match/mean": 0.5, "rollout_corr/logprob_diff_max": 3e-5},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    lines = real.report(run).splitlines()
    assert lines[0] == "|  | as it is | after the warm start | after training |"
    assert lines[2] == (
        "| exact match, sampled | 0.000 [0.00, 0.00] | 0.250 [0.00, 0.25] | 0.500 [0.00, 0.50] |"
    )
    assert lines[4] == "| exact match, search finds nothing | – | – | 0.062 [0.00, 0.06] |"
    assert lines[6] == "| F1, sampled | – | – | – |"  # these evaluations have none
    assert "rewards of the 2 training steps: 0.25 0.50" in lines
    assert any(line.endswith("of the same questions: 0.250 [0.250, 0.250]") for line in lines)
    assert "sampler against trainer, logprob_diff_max: at most 3.0e-05 nats" in lines
    assert lines[-1] == "seconds a step: 50 (median)"
