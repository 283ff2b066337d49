"""Reward functions of each signature: their arguments, and how their results are read."""

import copy
import functools
import math

import numpy as np
import pytest

from jaxrl.envs.base import Episode, Reward, ScoredEpisode, Task, Turn
from jaxrl.envs.rewards.combiner import RewardPartResult
from jaxrl.envs.rewards.functions import CALLING_CONVENTIONS, RewardFunction, detect_convention

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
RESPONSE = "".join(turn.text + (turn.observation or "") for turn in TURNS)


def make_episode(task=QUESTION, turns=TURNS, ids=(5, 6, 7), opener=""):
    episode = Episode(task=task, turns=list(turns), opener=opener)
    return ScoredEpisode(
        episode=episode, reward=Reward(parts={}, final_answer=""), completion_ids=list(ids)
    )


def make_part(function, answer_is_text=False, **settings):
    return RewardFunction(
        name="mine", function=function, convention=detect_convention(function), settings=settings,
        answer_is_text=answer_is_text,
    )  # fmt: skip


def measure(function, group=None, **settings):
    """Return the results for a group, and the number of calls."""
    calls = make_part(function, **settings).requests(group or [make_episode()])
    return [result for call in calls for result in call.parse(call.invoke())], len(calls)


def contains_answer(response, answers):
    return float(any(answer in response for answer in answers))


def test_our_signature_is_called_for_each_response():
    other = make_episode(turns=[Turn(text="no")])
    results = [RewardPartResult(score=1.0), RewardPartResult(score=0.0)]
    assert measure(contains_answer, [make_episode(), other]) == (results, 2)


def test_verl_gets_the_response_and_the_ground_truth():
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info, scale=1.0):
        seen.append([data_source, solution_str, ground_truth, copy.deepcopy(extra_info), scale])
        extra_info.clear()  # its own copy
        return np.float32(0.5)

    group = [make_episode(opener="<think>"), make_episode(CHAT, [Turn(text="It is 42.")])]
    assert measure(compute_score, group, scale=2.0) == ([RewardPartResult(score=0.5)] * 2, 2)
    targets = {"target": ["Paris", "Lutetia"]}
    assert seen == [
        ["nq", "<think>" + RESPONSE, targets, {"hop": 2}, 2.0],
        ["gsm8k", "It is 42.", "42", {"index": 3, "tags": ["easy"]}, 2.0],
    ]
    assert CHAT.metadata["extra_info"] == {"index": 3, "tags": ["easy"]}


def test_verl_gets_the_answer_of_a_math_task_as_text():
    def compute_score(solution_str, ground_truth):
        return float(ground_truth == "Paris")

    [call] = make_part(compute_score, answer_is_text=True).requests([make_episode()])
    assert call.invoke() == 1.0


def test_verl_may_return_further_numbers():
    def compute_score(solution_str, ground_truth):
        further = {"acc": np.bool_(False), "f1": np.float64(0.25), "pred": "x", "n": None}
        return {"score": True, **further}

    [result], _ = measure(compute_score)
    assert (result.score, dict(result.extra_values)) == (1.0, {"acc": 0.0, "f1": 0.25})


def test_trl_is_called_once_for_the_group_by_keyword():
    seen = {}

    def score(prompts, completions, completion_ids, hop, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions, ids=completion_ids, hop=hop)
        return [None, 2]

    group = [make_episode(), make_episode(turns=[Turn(text="no")], ids=(8,))]
    assert measure(score, group) == ([RewardPartResult(score=None), RewardPartResult(score=2.0)], 1)
    assert seen == {
        "prompts": ["Where?"] * 2, "completions": [RESPONSE, "no"], "ids": [[5, 6, 7], [8]],
        "hop": [2, 2], "id": ["q1"] * 2, "data_source": ["nq"] * 2,
        "answers": [["Paris", "Lutetia"]] * 2, "answer": ["Paris"] * 2, "question": ["Where?"] * 2,
    }  # fmt: skip


def test_trl_gets_chats_if_the_task_is_a_chat():
    def score(completions, prompts, reward_model, **kwargs):
        assert prompts == [[dict(m) for m in CHAT.messages]]
        assert [[(m["role"], m["content"]) for m in chat] for chat in completions] == [
            [
                ("assistant", "<think>" + TURNS[0].text),
                ("tool", TURNS[0].observation),
                ("assistant", TURNS[1].text),
            ]
        ]
        return np.array([len(reward_model)])

    results, _ = measure(score, [make_episode(task=CHAT, opener="<think>")])
    assert results == [RewardPartResult(score=1.0)]


class AsyncJudge:
    async def __call__(self, response, answers):
        return 1.0


async def coroutine(response):
    return 1.0


def test_async_functions_are_detected():
    for function in (coroutine, AsyncJudge(), functools.partial(coroutine)):
        assert make_part(function).is_async
    assert not make_part(functools.partial(contains_answer)).is_async


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda response, answers: 0, "response"),
        (lambda turns: 0, "turns"),
        (lambda solution_str, ground_truth, **kwargs: 0, "solution_str"),
        (lambda prompts, completions, answers, turns: 0, "completions"),
        (lambda text, truths: 0, None),
        (lambda response, answers, /: 0, None),
    ],
)
def test_names_of_parameters_tell_the_signature(function, kind):
    assert detect_convention(function) is CALLING_CONVENTIONS.get(kind)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda response: None, "'mine' returned None; expected a finite number"),
        (lambda response: np.zeros(2), "can .*onvert"),
        (lambda turns: [1.0], "'mine' returned .1.0.; expected a list of 2 values, one per turn"),
        (lambda solution_str: {"acc": 1.0}, "'acc'; expected the key 'score'"),
        (lambda solution_str: {"score": 1.0, "acc": math.nan}, "'mine/acc' returned nan"),
        (lambda completions: [math.nan], "'mine' returned nan"),
        (lambda completions: b"\1", "'mine' returned b'.x01'; expected a list of 1 values"),
    ],
)
def test_results_that_are_no_scores_are_refused(function, message):
    with pytest.raises(ValueError, match=message):
        measure(function)


def test_fields_that_a_task_lacks_are_named():
    def needs_solution(completions, solution, **kwargs): ...

    assert make_part(needs_solution).missing_fields(QUESTION) == ["solution"]
    assert make_part(needs_solution, solution=1).missing_fields(QUESTION) == []
    has_default = make_part(lambda completions, hop, solution=None: 0)
    assert has_default.missing_fields(QUESTION) == []
