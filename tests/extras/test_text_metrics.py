"""BLEU and ROUGE-L of final answers, worked by hand."""

import math
import sys

import pytest

from jaxrl.builders.validation import validate
from jaxrl.envs.base import Episode, Reward, ScoredEpisode, Task
from jaxrl.envs.rewards.combiner import RewardCombiner
from jaxrl.extras.text_metrics.part import Bleu, RougeL
from tests import helpers

MAT = "the cat is on the mat"
GUNMAN = "police killed the gunman"


@pytest.mark.parametrize(
    ("part", "answer", "truths", "score"),
    [
        # Precisions 5/6, 3/5 and 1/4; no 4-gram of three matches, which counts as half of one.
        (Bleu, "the cat sat on the mat", [MAT], (5 / 6 * 3 / 5 * 1 / 4 * 1 / 6) ** (1 / 4)),
        (Bleu, "the cat", ["a dog", "the cat sat"], math.exp(1 - 3 / 2)),  # all match; brevity
        (Bleu, MAT, ["a dog", MAT], 1.0),
        (Bleu, "Rome", ["Paris"], 0.0),
        # The longest common subsequence is `the gunman`: precision 2/3, recall 2/4.
        (RougeL, "The gunman, police", ["a dog", GUNMAN], 4 / 7),
        (RougeL, GUNMAN, [GUNMAN, "a dog"], 1.0),
        (RougeL, "Rome", ["Paris"], 0.0),
    ],
)
def test_values_by_hand(part, answer, truths, score):
    assert part().compute_score(answer, truths) == pytest.approx(score)
    assert part().compute_score(answer, truths) <= 1


@pytest.mark.parametrize("part", [Bleu(), RougeL()])
def test_the_final_answer_is_scored_unless_it_abstains(part):
    def score(**reward):
        episode = Episode(task=Task(id="t", question="", answers=("I know",)))
        scored = ScoredEpisode(episode=episode, reward=Reward(parts={}, **reward))
        [[result]] = RewardCombiner(weights={"x": 2.0}, custom_parts={"x": part})([[scored]])
        return result.total

    assert score(final_answer="I know") == 2.0
    assert score(final_answer="") == score(final_answer="I know", is_abstention=True) == 0.0


@pytest.mark.parametrize(("name", "module"), [("bleu", "sacrebleu"), ("rouge_l", "rouge_score")])
def test_a_missing_library_is_named_with_its_extra(monkeypatch, name, module):
    config = helpers.settings(**{"model.path": "a", "reward.weights": {name: 1.0}})
    assert [*validate(config, needs_data=False).reward_parts] == [name]
    for loaded in [m for m in sys.modules if m.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"{name}'.*{module}.*pip install 'jaxrl\[text-metrics]'"):
        validate(config, needs_data=False)
