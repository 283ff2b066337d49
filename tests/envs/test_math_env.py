import pytest

from jaxrl.envs.base import Episode, Outcome, Prompt, Task, Turn
from jaxrl.envs.math_env import MathEnv

TASK = Task(id="t", question="What is 1/4 + 1/4?", answers=("1/2",))


def make_env(**settings):
    defaults = {"system": "", "template": "{question}\nEnd with Answer: .."}
    return MathEnv(prompt=Prompt(**(defaults | settings)))


def play(env, text, task=TASK):
    episode = Episode(task=task)
    [result] = env.step([episode], [text])
    episode.turns.append(Turn(text=text))
    episode.outcome = result.outcome
    [reward] = env.score([episode])
    return result, reward


@pytest.mark.parametrize(
    ("text", "outcome", "math", "answer"),
    [
        ("A half.\nAnswer: 0.5", Outcome.ANSWERED, 1.0, "0.5"),
        ("Answer: 2", Outcome.ANSWERED, -1.0, "2"),
        ("Answer: I don't know", Outcome.ABSTAINED, -1.0, "I don't know"),
        ("A half.", Outcome.MALFORMED, -1.0, ""),
        ("Answer:", Outcome.MALFORMED, -1.0, ""),
    ],
)
def test_one_turn(text, outcome, math, answer):
    result, reward = play(make_env(), text)
    assert result.outcome == outcome
    assert result.observation is result.tool_call is None
    assert MathEnv.stop_strings == ()
    assert reward.parts == {"math": math, "exact_match": float(math > 0)}
    assert reward.final_answer == answer
    assert reward.is_correct == (math > 0)
    assert reward.is_abstention == (outcome == Outcome.ABSTAINED)
    assert reward.is_well_formed == (outcome != Outcome.MALFORMED)


def test_score_needs_an_accepted_answer():
    with pytest.raises(ValueError, match="t7"):
        play(make_env(), "Answer: 5", Task(id="t7", question="?"))
