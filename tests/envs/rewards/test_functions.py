"""Reward functions of each signature: what they are given, and what is read of their answers."""

import copy
import functools
import itertools
import math

import numpy as np
import pytest

from jaxrl.envs.base import Episode, Reward, ScoredEpisode, Task, Turn
from jaxrl.envs.rewards.combiner import PartResult
from jaxrl.envs.rewards.functions import KINDS, RewardFunction, detect_kind

QUESTION = Task(
    id="q1", question="Where?", answers=("Paris", "Lutetia"), data_source="nq", metadata={"hop": 2}
)
CHAT = Task(
    id="q2",
    messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*7?"}),
    answers=("42",),
    data_source="gsm8k",
    metadata={
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {"index": 3, "tags": ["easy"]},
    },
)
TURNS = [
    Turn(text="<search>a</search>", tool_call="a", observation="<information>b</information>"),
    Turn(text="<answer>Paris</answer>"),
]


def finished(task=QUESTION, turns=TURNS, ids=(5, 6, 7), opener=""):
    episode = Episode(task=task, turns=list(turns), opener=opener)
    return ScoredEpisode(
        episode=episode, reward=Reward(parts={}, final_answer=""), completion_ids=list(ids)
    )


def part(function, answer_is_text=False, **settings):
    return RewardFunction(
        name="mine", function=function, kind=detect_kind(function), settings=settings,
        answer_is_text=answer_is_text,
    )  # fmt: skip


def measured(function, group=None, **settings):
    """What the calls about a group give, and how many there are."""
    calls = part(function, **settings).requests(group or [finished()])
    return [one for call in calls for one in call.parse(call.invoke())], len(calls)


def ours(response, answers):
    return float(any(answer in response for answer in answers))


def test_ours_is_called_for_each_response():
    other = finished(turns=[Turn(text="no")])
    assert measured(ours, [finished(), other]) == (
        [PartResult(score=1.0), PartResult(score=0.0)],
        2,
    )


def test_verl_gets_the_response_alone_and_the_ground_truth():
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info, scale=1.0):
        seen.append([data_source, solution_str, ground_truth, copy.deepcopy(extra_info), scale])
        extra_info.clear()  # its own copy
        return np.float32(0.5)

    group = [finished(opener="<think>"), finished(task=CHAT, turns=[Turn(text="It is 42.")])]
    assert measured(compute_score, group, scale=2.0) == ([PartResult(score=0.5)] * 2, 2)
    response = "".join(turn.text + (turn.observation or "") for turn in TURNS)
    targets = {"target": ["Paris", "Lutetia"]}
    assert seen == [
        ["nq", "<think>" + response, targets, {"hop": 2}, 2.0],
        ["gsm8k", "It is 42.", "42", {"index": 3, "tags": ["easy"]}, 2.0],
    ]
    assert CHAT.metadata["extra_info"] == {"index": 3, "tags": ["easy"]}


def test_a_ground_truth_of_mathematics_is_a_text():
    def compute_score(solution_str, ground_truth):
        return float(ground_truth == "Paris")

    [call] = part(compute_score, answer_is_text=True).requests([finished()])
    assert call.invoke() == 1.0


def test_verl_may_answer_with_further_numbers():
    def compute_score(solution_str, ground_truth):
        return {
            "score": True,
            "acc": np.bool_(False),
            "f1": np.float64(0.25),
            "pred": "x",
            "n": None,
        }

    [found], _ = measured(compute_score)
    assert (found.score, dict(found.others)) == (1.0, {"acc": 0.0, "f1": 0.25})


def test_trl_is_called_once_for_the_group_by_keyword():
    seen = {}

    def score(prompts, completions, completion_ids, hop, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions, ids=completion_ids, hop=hop)
        return [None, 2]

    group = [finished(), finished(turns=[Turn(text="no")], ids=(8,))]
    assert measured(score, group) == ([PartResult(score=None), PartResult(score=2.0)], 1)
    assert seen.pop("completions") == ["".join(t.text + (t.observation or "") for t in TURNS), "no"]
    assert seen == {
        "prompts": ["Where?"] * 2, "ids": [[5, 6, 7], [8]], "hop": [2, 2], "id": ["q1"] * 2,
        "data_source": ["nq"] * 2, "answers": [["Paris", "Lutetia"]] * 2, "answer": ["Paris"] * 2,
        "question": ["Where?"] * 2,
    }  # fmt: skip


def test_trl_reads_chats_where_the_task_is_one():
    def score(completions, prompts, reward_model, **kwargs):
        assert prompts == [[dict(m) for m in CHAT.messages]]
        assert [[(m["role"], m["content"]) for m in one] for one in completions] == [
            [
                ("assistant", "<think>" + TURNS[0].text),
                ("tool", TURNS[0].observation),
                ("assistant", TURNS[1].text),
            ]
        ]
        return np.array([len(reward_model)])

    assert measured(score, [finished(task=CHAT, opener="<think>")])[0] == [PartResult(score=1.0)]


class Judge:
    async def __call__(self, response, answers):
        return 1.0


def later(response):
    return 1.0


async def coroutine(response):
    return 1.0


@pytest.mark.parametrize(
    ("function", "is_async"),
    [
        (later, False),
        (coroutine, True),
        (Judge(), True),
        (functools.partial(coroutine), True),
        (functools.partial(later), False),
    ],
)
def test_async_functions_are_known(function, is_async):
    assert part(function).is_async == is_async


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda response, answers: 0, "response"),
        (lambda turns: 0, "turns"),
        (lambda solution_str, ground_truth, **kwargs: 0, "solution_str"),
        (lambda completions, **kwargs: 0, "completions"),
        (lambda prompts, completions, answers, turns: 0, "completions"),
        (lambda text, truths: 0, None),
        (lambda **kwargs: 0, None),
        (lambda response, answers, /: 0, None),
    ],
)
def test_the_signature_is_told_by_names(function, kind):
    assert detect_kind(function) is KINDS.get(kind)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda response: None, "'mine' returned None; expected a finite number"),
        (lambda response: math.nan, "'mine' returned nan; expected a finite number"),
        (lambda response: np.zeros(2), "can .*onvert"),
        (lambda turns: [1.0], "'mine' returned 1 values for 2 turns"),
        (lambda turns: [1.0, math.inf], "'mine' returned inf"),
        (
            lambda solution_str: {"acc": 1.0},
            "'mine' returned the keys 'acc'; expected the key 'score'",
        ),
        (lambda solution_str: {"score": 1.0, "acc": math.nan}, "'mine/acc' returned nan"),
        (lambda solution_str: {"score": "1"}, "'mine' returned '1'"),
        (lambda completions: [1.0, 2.0], "'mine' returned more than 1 values for 1 completions"),
        (
            lambda completions: itertools.count(),
            "'mine' returned more than 1 values for 1 completions",
        ),
        (lambda turns: itertools.repeat(0.0), "'mine' returned more than 2 values for 2 turns"),
        (lambda completions: iter(()), "'mine' returned 0 values for 1 completions"),
        (lambda completions: [math.nan], "'mine' returned nan"),
        (lambda completions: {0: 1.0}, "'mine' returned {0: 1.0}; expected a list"),
        (lambda completions: {1.0}, "'mine' returned {1.0}; expected a list"),
        (lambda completions: b"\1", "'mine' returned b'.x01'; expected a list"),
        (lambda completions: None, "'mine' returned None; expected a list"),
        (
            lambda turns, answers: {0: 1.0, 1: 0.0},
            "'mine' returned {0: 1.0, 1: 0.0}; expected a list",
        ),
    ],
)
def test_what_is_no_score_is_refused(function, told):
    with pytest.raises(ValueError, match=told):
        measured(function)


def test_what_a_task_does_not_offer_is_known_beforehand():
    assert part(lambda completions, solution, **kwargs: 0).missing_fields(QUESTION) == ["solution"]
    assert (
        part(lambda completions, solution, **kwargs: 0, solution=1).missing_fields(QUESTION) == []
    )
    assert part(lambda completions, hop, solution=None: 0).missing_fields(QUESTION) == []
    assert part(lambda response, tone: 0).missing_fields(QUESTION) == ["tone"]
