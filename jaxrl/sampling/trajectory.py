"""A trajectory while it grows, and as it is trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl.envs.base import CallRecord, Episode, Outcome, Reward, ScoredEpisode
from jaxrl.models.aux_arrays import TokenArray
from jaxrl.sampling.contexts import PlayedTurn
from jaxrl.sampling.engine import Event
from jaxrl.types import Attachment, Trajectory
from jaxrl.utils.concurrency import failure_report
from jaxrl.utils.text import writable


@dataclass(slots=True)
class Span:
    """Tokens that were sampled one after another; the arrays of each append, in their order."""

    start: int  # place of the first one
    end: int  # behind the last one
    versions: int | Sequence[int]  # of the weights, one for all or one for each
    logprobs: list[np.ndarray] = field(default_factory=list)  # float32, nats
    entropies: list[np.ndarray] = field(default_factory=list)  # float32, nats


@dataclass(kw_only=True, slots=True)
class Sample:
    """A trajectory while it grows."""

    episode: Episode
    sample_index: int
    attempt: int
    token_ids: list[int]
    prompt_length: int
    attachments: list[Attachment] = field(default_factory=list)  # shown so far
    sampled: list[Span] = field(default_factory=list)  # in their order
    num_sampled: int = 0  # tokens that the policy wrote
    # By context, of its tokens in order.
    recorded: list[list[Mapping[str, np.ndarray]]] = field(default_factory=lambda: [[]])
    contexts: list[tuple[int, int]] = field(default_factory=list)  # see `Trajectory.contexts`
    played: list[PlayedTurn] = field(default_factory=list)  # where there may be several contexts
    key: np.ndarray | None = None  # uint32 [2], of the first context; see `sample_keys.py`
    turn_starts: list[int] = field(default_factory=list)  # of every turn and the one under way
    reward: Reward | None = None
    reward_records: tuple[CallRecord, ...] = ()
    usage: Mapping[str, float] = field(default_factory=dict)  # of a model behind an endpoint

    def begin_first_turn(self) -> None:
        """Begins the first turn, behind the prompt."""
        self.turn_starts = [self.prompt_length]

    def append_sampled(self, event: Event, version: int) -> None:
        """Appends what the engine sampled with weights of a version."""
        self.append(event.token_ids.tolist(), event.logprobs, event.entropies, version)
        if event.recorded:
            self.recorded[-1].append(event.recorded)

    def append_unknown(self, token_ids: Sequence[int], version: int) -> None:
        """Appends what a model wrote whose probabilities nobody knows."""
        unknown = np.full(len(token_ids), np.nan, np.float32)
        self.append(token_ids, unknown, unknown, version)

    def append(
        self,
        token_ids: Sequence[int],
        logprobs: np.ndarray,
        entropies: np.ndarray,
        versions: int | Sequence[int],
    ) -> None:
        """Appends what a model wrote.

        Args:
            token_ids: n of them.
            logprobs: float32 [n], nats.
            entropies: float32 [n], nats.
            versions: see `Span`.
        """
        if not token_ids:
            return
        start = len(self.token_ids)
        span = self.sampled[-1] if self.sampled else None
        follows = span is not None and span.end == start and span.versions == versions
        if span is None or not follows or not isinstance(versions, int):
            span = Span(start, start, versions)
            self.sampled.append(span)
        span.logprobs.append(logprobs)
        span.entropies.append(entropies)
        self.token_ids.extend(token_ids)
        span.end = len(self.token_ids)
        self.num_sampled += len(token_ids)

    def append_observation(self, token_ids: Sequence[int]) -> None:
        """Appends what the environment inserted, and begins the next turn."""
        self.token_ids.extend(token_ids)
        self.turn_starts.append(len(self.token_ids))

    def begin_context(self, token_ids: Sequence[int], num_repeated: int) -> None:
        """Goes on in another context, which begins with these ids, and begins the next turn there.

        Of the ids the first `num_repeated` stand in an earlier context too.
        """
        self.contexts.append((len(self.token_ids), num_repeated))
        self.recorded.append([])
        self.append_observation(token_ids)

    @property
    def context_length(self) -> int:
        """Tokens of the context that it is in."""
        return len(self.token_ids) - (self.contexts[-1][0] if self.contexts else 0)

    def token_arrays(self, declared: Mapping[str, TokenArray]) -> dict[str, np.ndarray]:
        """Recorded arrays `[L, ...]`; a context's last token, which is not read, has `fill`."""
        if not any(self.recorded):  # an episode that did not begin
            return {}
        starts = [0, *(start for start, _ in self.contexts), len(self.token_ids)]
        lengths = np.diff(starts).tolist()
        arrays = {}
        for name, array in declared.items():
            parts = []
            for events, length in zip(self.recorded, lengths, strict=True):
                read = [one[name] for one in events]
                parts += [*read, array.filled(length - sum(map(len, read)))]
            arrays[name] = np.concatenate(parts)
        return arrays

    @property
    def has_failed(self) -> bool:
        """True of an environment error."""
        return self.episode.outcome == Outcome.ENVIRONMENT_ERROR

    def finished(self, reward: Reward) -> ScoredEpisode:
        """The trajectory for whoever pays it.

        Its `completion_ids` are all ids behind the prompt; those that a later context repeats
        stand there once.
        """
        ids, first = [], self.prompt_length
        for start, count in self.contexts:
            ids += self.token_ids[first:start]
            first = start + count
        ids += self.token_ids[first:]
        return ScoredEpisode(episode=self.episode, reward=reward, completion_ids=ids)

    def fail(self, error: BaseException) -> None:
        """Ends as an environment error, since it could not be scored."""
        turns, message = self.episode.turns, writable(f"score: {failure_report(error)}")
        self.episode.outcome = Outcome.ENVIRONMENT_ERROR
        turns[-1] = dataclasses.replace(turns[-1], error=message)


def trajectory_of(sample: Sample, recorded: Mapping[str, TokenArray]) -> Trajectory:
    """The trajectory of a sample as it stands, with its recorded arrays."""
    reward, length = sample.reward, len(sample.token_ids)
    loss_mask, versions = np.zeros(length, bool), np.full(length, -1, np.int32)
    logprobs, entropies = np.zeros((2, length), np.float32)
    for span in sample.sampled:
        loss_mask[span.start : span.end] = True
        versions[span.start : span.end] = span.versions
    if sample.sampled:
        logprobs[loss_mask] = np.concatenate([x for one in sample.sampled for x in one.logprobs])
        entropies[loss_mask] = np.concatenate([x for one in sample.sampled for x in one.entropies])
    scored: dict[str, Any] = {}
    if reward is not None:
        scored = {
            "reward": reward.total,
            "reward_parts": dict(reward.parts),
            "turn_rewards": reward.turn_totals,
            "rest_reward": reward.rest,
            "final_answer": reward.final_answer,
            "is_correct": reward.is_correct,
            "is_abstention": reward.is_abstention,
            "is_well_formed": reward.is_well_formed,
        }
    return Trajectory(
        token_ids=np.array(sample.token_ids, np.int32),
        loss_mask=loss_mask,
        rollout_logprobs=logprobs,
        rollout_entropies=entropies,
        policy_versions=versions,
        attachments=tuple(sample.attachments),
        token_arrays=sample.token_arrays(recorded),
        prompt_length=sample.prompt_length,
        sample_index=sample.sample_index,
        attempt=sample.attempt,
        task=sample.episode.task,
        opener=sample.episode.opener,
        turns=tuple(sample.episode.turns),
        turn_starts=tuple(sample.turn_starts),
        contexts=tuple(sample.contexts),
        reward_records=sample.reward_records,
        outcome=sample.episode.outcome or Outcome.OUT_OF_BUDGET,
        usage=sample.usage,
        **scored,
    )
