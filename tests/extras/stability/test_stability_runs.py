"""A run with all remedies: what its files say is what each of them does."""

import json

import pytest

from jaxrl.builders.validation import validate
from jaxrl.envs.rewards.attribution import occurs_in
from jaxrl.logs.display import Display
from jaxrl.run import run
from tests.helpers import build, settings_of
from tests.runs import base_config, records, trajectories

pytestmark = [
    pytest.mark.minutes,
    pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size"),
]

FIRST = "jaxrl.extras.stability.first_occurrence.first_occurrence"
REMEDIES = {
    **{"loss.name": "dppo", "loss.dppo.anchor": "rollout", "loss.clip_high": 1e-4},
    **{"loss.term.name": "llds", "loss.token_filter.name": "off_policy"},
    **{"loss.token_filter.off_policy.delta": 0.0},
    **{"loss.correction.level": "geometric", "loss.correction.mode": "reject"},
    **{"filter.trajectories": "void_turns", "optimizer.num_epochs": 2},
    **{"reward.weights": {"exact_match": 1.0, "format": 0.5, FIRST: 0.3}},
    **{"advantage.by_turn": True, "optimizer.lr": 1e-3, "log.trajectories": -1},
    "rollout.max_observation_tokens": 72, "rollout.max_total_tokens": 160,
}  # fmt: skip


@pytest.fixture(scope="module")
def workdir(tiny_world, warm_model, quick_compilation, tmp_path_factory):
    config = base_config(tiny_world, warm_model)
    config.update_from_flattened_dict(REMEDIES)
    # Professions are accepted too, which most documents name.
    folder = tmp_path_factory.mktemp("remedies")
    lines = (tiny_world / "questions_train.jsonl").read_text().splitlines()
    tasks = [json.loads(line) for line in lines]
    tasks = [task | {"answers": [*task["answers"], "sailor", "potter"]} for task in tasks]
    config.tasks.train.source = str(folder / "questions.jsonl")
    (folder / "questions.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    validate(config)
    workdir = folder / "run"
    workdir.mkdir()
    run(settings_of(config), workdir, build(config), Display())
    return workdir


def test_each_shows_in_the_numbers_of_a_step(workdir):
    for step in records(workdir)[1:]:
        assert 0 < step["actor/llds_share"] < 1
        assert step["actor/term_loss"] > 0
        assert 0 < step["actor/gated_share"] < 1  # in the second update
        assert 0 < step["actor/pg_clipfrac"] < 1
        assert step["rollout_corr/weight_mean"] == pytest.approx(1.0)  # no gap, so nothing rejected


def test_void_turns_are_left_out_and_counted(workdir):
    all_sound = []
    for number, step in enumerate(records(workdir)[1:], 1):
        lines = trajectories(workdir, number)
        sound = [
            all(turn["observation"] is not None for turn in line["turns"][:-1])
            and line["outcome"] != "malformed"
            and not line["turns"][-1].get("is_cut", False)
            for line in lines
        ]
        # A turn that the budget of tokens ended is not a call beyond the turns allowed.
        over = [line for line in lines if line["outcome"] == "out_of_budget"]
        assert all(
            ("</search>" in line["turns"][-1]["text"]) != line["turns"][-1].get("is_cut", False)
            for line in over
        )
        assert step["filter/trained_share"] == sum(sound) / len(sound)
        all_sound += sound
    assert 0 < sum(all_sound) < len(all_sound)


def test_the_search_that_shows_the_answer_is_paid(workdir):
    paid = 0
    for number in (1, 2):
        for line in trajectories(workdir, number):
            shows = [
                any(occurs_in(answer, turn["observation"] or "") for answer in line["ground_truth"])
                for turn in line["turns"]
            ]
            assert line["reward_parts"]["first_occurrence"] == float(any(shows))
            paid += any(shows)
    assert paid
