"""BLEU and ROUGE-L of the final answer as reward parts, computed by sacrebleu and rouge-score."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from jaxrl.envs.base import ScoredEpisode
from jaxrl.envs.rewards.combiner import AnswerPart, RewardPartResult


class TextMetric(AnswerPart):
    """Reward part in [0, 1]: the best match of the final answer with an accepted answer.

    An abstention scores 0.
    """

    @abstractmethod
    def compute_score(self, answer: str, truths: Sequence[str]) -> float:
        """Return the score of an answer, maximized over `truths`."""

    def score_answer(self, sample: ScoredEpisode) -> RewardPartResult:
        """Score the final answer of an episode."""
        reward = sample.reward
        if reward.is_abstention or not reward.final_answer:
            return RewardPartResult(score=0.0)
        return RewardPartResult(
            score=self.compute_score(reward.final_answer, sample.episode.task.answers)
        )


class Bleu(TextMetric):
    """Reward part `bleu`: sentence BLEU with sacrebleu's default tokenizer and smoothing."""

    def __init__(self) -> None:
        """Import sacrebleu.

        Raises:
            ImportError: sacrebleu is not installed.
        """
        try:
            from sacrebleu import sentence_bleu
        except ImportError as error:
            raise ImportError(f"{error}; pip install 'jaxrl[text-metrics]'") from error
        self._sentence_bleu = sentence_bleu

    def compute_score(self, answer: str, truths: Sequence[str]) -> float:
        """Return the BLEU of an answer, maximized over `truths`."""
        best = max(self._sentence_bleu(answer, [truth]).score for truth in truths)
        return min(best / 100, 1.0)  # sacrebleu rounds a perfect score up to 100.00000000000004


class RougeL(TextMetric):
    """Reward part `rouge_l`: ROUGE-L F-measure with rouge-score's default tokenizer.

    The tokenizer lowercases and drops all characters except a-z and 0-9, so an answer in a
    non-Latin script scores 0.
    """

    def __init__(self) -> None:
        """Import rouge-score.

        Raises:
            ImportError: rouge-score is not installed.
        """
        try:
            from rouge_score.rouge_scorer import RougeScorer
        except ImportError as error:
            raise ImportError(f"{error}; pip install 'jaxrl[text-metrics]'") from error
        self._scorer = RougeScorer(["rougeL"])

    def compute_score(self, answer: str, truths: Sequence[str]) -> float:
        """Return the F-measure of an answer, maximized over `truths`."""
        return float(self._scorer.score_multi(truths, answer)["rougeL"].fmeasure)
