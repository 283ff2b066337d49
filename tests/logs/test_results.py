"""Scores of evaluations by name, and the lines that a run ends in."""

import json

import pytest

from jaxrl.logs.results import format_scores, read_scores


def write(workdir, stage, step, summary, weights):
    folder = workdir / "eval"
    folder.mkdir(exist_ok=True)
    content = {"summary": summary, "reward_weights": weights}
    (folder / f"{stage}_{step}.json").write_text(json.dumps(content))


def means(exact_match, form):
    return {"exact_match": exact_match, "format": form}


BOTH = {"exact_match": 1.0, "format": 0.2}


@pytest.fixture
def workdir(tmp_path):
    """An evaluation before and one after, a damaged file, and one that a killed run left."""
    greedy, sampled = {"all": means(0.25, 0.5)}, {"all": means(0.0, 0.5)}
    first = {"greedy": greedy, "sampled": sampled}
    write(tmp_path, "train", 4, first, dict.fromkeys(first, BOTH))
    last = {
        "sampled": {"all": means(0.5, 1.0), "hop": means(None, 1.0)},
        "empty_search": {"all": means(0.125, 0.5)},
    }
    write(tmp_path, "evaluate", 9, last, dict.fromkeys(last, BOTH))
    (tmp_path / "eval" / "train_5.json").write_text("{")
    write(tmp_path, "train", 11, first, {})
    return tmp_path


def test_scores_are_read_by_name(workdir):
    first, last = read_scores(workdir, 10)
    assert first["exact_match"] == first["exact_match/sampled"] == 0.0
    assert first["exact_match/greedy"] == 0.25
    assert first["reward/greedy"] == pytest.approx(0.25 + 0.2 * 0.5)
    assert last["reward"] == pytest.approx(0.5 + 0.2)
    assert last["hop/format"] == 1.0
    # A mean that is missing has no score, and no reward is made of it.
    assert not {"hop/exact_match", "hop/reward"} & last.keys()


def test_the_reward_comes_first_and_controls_apart(workdir):
    assert format_scores(read_scores(workdir, 10)) == [
        "reward: sampled 0.100 -> 0.700; exact match: sampled 0.000 -> 0.500",
        "controls, reward: search finds nothing 0.225; exact match: search finds nothing 0.125",
    ]


def test_a_reward_that_is_the_exact_match_is_shown_once(tmp_path):
    summary = {"greedy": {"all": means(0.5, 0.25)}}
    write(tmp_path, "evaluate", 0, summary, {"greedy": {"exact_match": 1.0, "format": 0}})
    assert format_scores(read_scores(tmp_path, 0)) == ["exact match: greedy 0.500"]


def test_a_reward_that_equals_the_exact_match_once_is_shown(tmp_path):
    for step, form in ((0, 0.5), (1, 0.0)):
        summary = {"greedy": {"all": means(0.0, form)}}
        write(tmp_path, "train", step, summary, {"greedy": BOTH})
    [line] = format_scores(read_scores(tmp_path, 1))
    assert line == "reward: greedy 0.100 -> 0.000; exact match: greedy 0.000 -> 0.000"
