"""Samples (trajectories still in rollout) and their conversion to trajectories."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl.envs.base import CallRecord, Episode, Outcome, Reward, ScoredEpisode
from jaxrl.models.aux_arrays import TokenArraySpec
from jaxrl.sampling.contexts import TurnIds
from jaxrl.types import Attachment, Trajectory
from jaxrl.utils.concurrency import format_error_report
from jaxrl.utils.text import replace_surrogates


@dataclass(slots=True)
class TokenSpan:
    """Consecutive sampled tokens, stored as one array per `append` call."""

    start: int  # position of the first token
    end: int  # position after the last token
    versions: int | Sequence[int]  # policy version, one for all tokens or one per token
    logprobs: list[np.ndarray] = field(default_factory=list)  # float32, nats
    entropies: list[np.ndarray] = field(default_factory=list)  # float32, nats


@dataclass(kw_only=True, slots=True)
class Sample:
    """Trajectory during its rollout."""

    episode: Episode
    sample_index: int
    attempt: int
    token_ids: list[int]
    prompt_length: int
    attachments: list[Attachment] = field(default_factory=list)  # attachments in `token_ids`
    sampled: list[TokenSpan] = field(default_factory=list)  # in order
    num_sampled: int = 0
    max_response_tokens: int | None = None  # see `Draw`
    # For each context, the recorded arrays of the context's tokens, in order.
    recorded: list[list[Mapping[str, np.ndarray]]] = field(default_factory=lambda: [[]])
    contexts: list[tuple[int, int]] = field(default_factory=list)  # see `Trajectory.contexts`
    turn_ids: list[TurnIds] = field(default_factory=list)  # only if there may be several contexts
    key: np.ndarray | None = None  # uint32 [2], key of the first context; see `derive_sample_keys`
    turn_starts: list[int] = field(default_factory=list)  # every turn, the current one included
    reward: Reward | None = None
    reward_records: tuple[CallRecord, ...] = ()
    usage: Mapping[str, float] = field(default_factory=dict)  # usage of an endpoint model

    def begin_first_turn(self) -> None:
        """Begin the first turn, after the prompt."""
        self.turn_starts = [self.prompt_length]

    def append_unknown_tokens(self, token_ids: Sequence[int], version: int) -> None:
        """Append tokens with unknown log-probabilities and entropies (NaN)."""
        unknown = np.full(len(token_ids), np.nan, np.float32)
        self.append(token_ids, unknown, unknown, version)

    def append(
        self,
        token_ids: Sequence[int],
        logprobs: np.ndarray,
        entropies: np.ndarray,
        versions: int | Sequence[int],
    ) -> None:
        """Append tokens sampled by a model, with log-probabilities and entropies in nats."""
        if not token_ids:
            return
        start = len(self.token_ids)
        span = self.sampled[-1] if self.sampled else None
        follows = span is not None and span.end == start and span.versions == versions
        if span is None or not follows or not isinstance(versions, int):
            span = TokenSpan(start, start, versions)
            self.sampled.append(span)
        span.logprobs.append(logprobs)
        span.entropies.append(entropies)
        self.token_ids.extend(token_ids)
        span.end = len(self.token_ids)
        self.num_sampled += len(token_ids)

    def append_observation(self, token_ids: Sequence[int]) -> None:
        """Append tokens inserted by the environment and begin the next turn."""
        self.token_ids.extend(token_ids)
        self.turn_starts.append(len(self.token_ids))

    def begin_context(self, token_ids: Sequence[int], num_repeated: int) -> None:
        """Begin a new context that starts with `token_ids`, and begin the next turn there.

        The first `num_repeated` ids also appear in an earlier context.
        """
        self.contexts.append((len(self.token_ids), num_repeated))
        self.recorded.append([])
        self.append_observation(token_ids)

    @property
    def context_length(self) -> int:
        """Return the length of the current context in tokens."""
        return len(self.token_ids) - (self.contexts[-1][0] if self.contexts else 0)

    def build_token_arrays(self, specs: Mapping[str, TokenArraySpec]) -> dict[str, np.ndarray]:
        """Return the sample's recorded arrays `[L, ...]`, by name.

        The last token of each context was never fed to the model, so its value is `fill`.
        """
        if not any(self.recorded):  # the episode never began
            return {}
        starts = [0, *(start for start, _ in self.contexts), len(self.token_ids)]
        lengths = np.diff(starts).tolist()
        arrays = {}
        for name, array in specs.items():
            parts = []
            for events, length in zip(self.recorded, lengths, strict=True):
                read = [item[name] for item in events]
                parts += [*read, array.full(length - sum(map(len, read)))]
            arrays[name] = np.concatenate(parts)
        return arrays

    @property
    def has_failed(self) -> bool:
        """Return True after an environment error."""
        return self.episode.outcome == Outcome.ENVIRONMENT_ERROR

    def to_scored_episode(self, reward: Reward) -> ScoredEpisode:
        """Return the episode with its reward, as a `ScoredEpisode`.

        Its `completion_ids` are all ids after the prompt. Ids that a later context repeats appear
        once.
        """
        ids, first = [], self.prompt_length
        for start, count in self.contexts:
            ids += self.token_ids[first:start]
            first = start + count
        ids += self.token_ids[first:]
        return ScoredEpisode(episode=self.episode, reward=reward, completion_ids=ids)

    def fail(self, error: BaseException) -> None:
        """Mark the episode as ended by an environment error, after its scoring failed."""
        turns = self.episode.turns
        message = replace_surrogates(f"score: {format_error_report(error)}")
        self.episode.outcome = Outcome.ENVIRONMENT_ERROR
        turns[-1] = dataclasses.replace(turns[-1], error=message)


def to_trajectory(sample: Sample, specs: Mapping[str, TokenArraySpec]) -> Trajectory:
    """Convert a sample to a trajectory, with the recorded arrays named in `specs`."""
    reward, length = sample.reward, len(sample.token_ids)
    loss_mask, versions = np.zeros(length, bool), np.full(length, -1, np.int32)
    logprobs, entropies = np.zeros((2, length), np.float32)

    # Scatter the spans over the tokens; everything else was inserted.
    for span in sample.sampled:
        loss_mask[span.start : span.end] = True
        versions[span.start : span.end] = span.versions
    if sample.sampled:
        logprobs[loss_mask] = np.concatenate([x for item in sample.sampled for x in item.logprobs])
        entropies[loss_mask] = np.concatenate(
            [x for item in sample.sampled for x in item.entropies]
        )

    # Samples without a reward keep the defaults of `Trajectory`.
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
        token_arrays=sample.build_token_arrays(specs),
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
