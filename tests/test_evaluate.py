import json

import pytest

from jaxrl.envs.base import Outcome, Task
from jaxrl.evaluate import as_metrics, evaluate, summarize, write_results
from jaxrl.sampling.rollout import Seeds
from tests.episodes import ANSWER, make_failure, make_trajectory

RIGHT = {"exact_match": 1.0, "format": 0.5}
WRONG = {"exact_match": 0.0, "format": -1.0}


def members():
    return [
        make_trajectory(parts=RIGHT, data_source="nq"),
        make_trajectory(parts=WRONG, data_source="nq", turns=(ANSWER,), length=12),
        make_trajectory(parts=WRONG, data_source="hotpot", outcome=Outcome.OUT_OF_BUDGET),
        make_failure(data_source="hotpot", length=40),
    ]


def test_means_by_hand():
    got = summarize(members())
    assert got["nq"] == {
        "exact_match": 0.5,
        "format": -0.25,
        "searches": 0.5,
        "sampled_tokens": 7.0,
        "answered": 1.0,
        "num_questions": 2,
        "environment_errors": 0,
    }
    assert got["hotpot"]["exact_match"] == 0.0
    assert (got["hotpot"]["num_questions"], got["hotpot"]["environment_errors"]) == (2, 1)
    assert got["all"]["exact_match"] == pytest.approx(1 / 3)
    assert got["all"]["sampled_tokens"] == pytest.approx((4 + 10 + 4) / 3)
    assert list(got) == ["all", "nq", "hotpot"]


def test_a_set_that_is_called_all():
    got = summarize([make_trajectory(parts=RIGHT, data_source="all")])
    assert got["all"]["num_questions"] == 1


def test_names_in_the_metrics():
    summary = summarize(members())
    sampled, greedy = (as_metrics(suite, summary) for suite in ("sampled", "greedy"))
    assert sampled["val-core/nq/exact_match/mean@1"] == 0.5
    assert greedy["val-core/nq/exact_match/greedy"] == 0.5
    assert sampled["val-aux/hotpot/environment_errors/sampled"] == 1
    assert not sampled.keys() & greedy.keys()
    assert all(name.startswith(("val-core/", "val-aux/")) for name in sampled)


@pytest.mark.filterwarnings("error")
def test_results_on_disk(tmp_path):
    suites = {"sampled": members(), "greedy": [make_failure()]}
    path = tmp_path / "eval" / "train_3.json"
    summaries = write_results(path, 3, suites)
    text = path.read_text(encoding="utf-8")
    assert "NaN" not in text
    content = json.loads(text)
    assert content["step"] == 3
    assert content["summary"]["sampled"] == summaries["sampled"]
    # Nothing could be scored: that is not an exact match of 0.
    down = content["summary"]["greedy"]["all"]
    assert "exact_match" not in down
    assert (down["searches"], down["environment_errors"]) == (None, 1)
    assert content["questions"]["sampled"][0] == {
        "task_id": "t0",
        "data_source": "nq",
        "question": "Où ?",
        "answers": ["x"],
        "final_answer": "x",
        "outcome": "answered",
        "searches": ["q"],
        "response": "<search>q</search>\n\nfound\n\n<answer>x</answer>",
        "exact_match": 1.0,
        "format": 0.5,
    }


class Engine:
    temperature = 0.7


def test_each_question_is_asked_once_at_the_given_temperature():
    engine, calls = Engine(), []

    def rollout(draws, **settings):
        calls.append((draws, settings, engine.temperature))
        return ["played"]

    tasks = [Task(id=name, question=name, answers=("x",)) for name in "ab"]
    seeds = Seeds(seed=1, stage=2, step=3)
    assert evaluate(engine, rollout, tasks, temperature=0.0, seeds=seeds) == ["played"]
    [(draws, settings, temperature)] = calls
    assert [(draw.task.id, draw.position) for draw in draws] == [("a", 0), ("b", 1)]
    assert settings == {"group_size": 1, "seeds": seeds, "policy_version": 0}
    assert temperature == 0.0
    assert engine.temperature == 0.7
