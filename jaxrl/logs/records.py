"""Human-readable trajectory records, with rounded numbers and image file names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.data.serialization import serialize_reward_records, serialize_turn
from jaxrl.envs.images import Picture
from jaxrl.types import Trajectory

Record = Mapping[str, Any]
"""A line of `metrics.jsonl`: `step`, `stage` and numbers. A number that is not finite is None."""

OPTIONAL_FIELDS = (
    *("turn_starts", "contexts", "turn_rewards", "rest_reward", "turn_advantages"),
    *("reward_reason", "is_abstention", "is_well_formed", "opener"),
)
"""Trajectory fields that are recorded only if they differ from their defaults."""


def build_trajectory_record(trajectory: Trajectory) -> dict[str, Any]:
    """Convert a training trajectory to its record in `trajectories/`.

    Advantages and losses can be recomputed from the record, up to rounding.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(trajectory)}
    optional = {name: getattr(trajectory, name) for name in OPTIONAL_FIELDS}
    return {
        "task_id": trajectory.task_id,
        "question": trajectory.task.question,
        "query": trajectory.query,
        "answers": list(trajectory.task.answers),
        "data_source": trajectory.task.data_source,
        **({"environment": name} if (name := trajectory.task.environment) else {}),
        "sample_index": trajectory.sample_index,
        "attempt": trajectory.attempt,
        "outcome": str(trajectory.outcome),
        "reward": None if trajectory.outcome == "environment_error" else trajectory.reward,
        "reward_parts": dict(trajectory.reward_parts),
        **(
            {"reward_records": reward_calls}
            if (reward_calls := serialize_reward_records(trajectory))
            else {}
        ),
        "final_answer": trajectory.final_answer,
        "is_correct": trajectory.is_correct,
        "advantage": trajectory.advantage,
        **{
            name: list(value) if isinstance(value, tuple) else value
            for name, value in optional.items()
            if value != defaults[name]
        },
        "generated_text": trajectory.generated_text,
        "turns": [
            serialize_turn(turn)
            | ({"images": _make_image_records(turn.images)} if turn.images else {})
            for turn in trajectory.turns
        ],
        **({"images": _make_image_records(images)} if (images := trajectory.task.images) else {}),
        "prompt_length": trajectory.prompt_length,
        "token_ids": trajectory.token_ids.tolist(),
        "loss_mask": trajectory.loss_mask.astype(int).tolist(),
        "rollout_logprobs": round_values(trajectory.rollout_logprobs),
        "rollout_entropies": round_values(trajectory.rollout_entropies),
        "policy_versions": trajectory.policy_versions.tolist(),
    }


def build_sample_table(trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """Build a table for trackers with one row of text and numbers per trajectory.

    The reward is None for an environment error. A reward part is None where it was not computed.
    """
    parts = sorted({name for t in trajectories for name in t.reward_parts})
    return [
        {
            "task_id": t.task_id,
            "sample_index": t.sample_index,
            "question": t.query,
            "answers": "; ".join(map(str, t.task.answers)),
            "response": t.generated_text,
            "final_answer": t.final_answer,
            "outcome": str(t.outcome),
            "reward": float(t.reward) if t.is_scored else None,
        }
        | {
            f"reward/{part}": float(t.reward_parts[part]) if part in t.reward_parts else None
            for part in parts
        }
        for t in trajectories
    ]


def round_values(values: np.ndarray, *, is_relative: bool = False) -> list[float]:
    """Round numbers to six decimal places, or to six significant digits.

    Args:
        values: Numbers, float [L].
        is_relative: True to round to significant digits, for small numbers such as weights.
    """
    return [float(f"{x:.6g}") if is_relative else round(float(x), 6) for x in values]


def round_token_arrays(fields: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """Round the per-token arrays of a trajectory for JSON. See `logs.tokens.make_token_logger`."""
    return {
        name: round_values(values, is_relative=not name.endswith("logprobs"))
        for name, values in fields.items()
    }


def _make_image_records(images: Iterable[Picture]) -> list[dict[str, Any]]:
    """Return the digest and file of each image and video; for a video of frames, of each frame.

    Images without a file are saved in the workdir.
    """
    return [
        {"digest": image.digest, "frames": _make_image_records(image.files)}
        if image.files != (image,)
        else {"digest": image.digest, "file": image.path or f"images/{image.digest}"}
        for image in images
    ]


def build_question_record(trajectory: Trajectory, error: str) -> dict[str, Any]:
    """Convert an evaluation trajectory to its record in the evaluation file.

    `error` is the message of the trajectory's environment error, or "".
    """
    return {
        "task_id": trajectory.task_id,
        "sample_index": trajectory.sample_index,
        "data_source": trajectory.task.data_source,
        **({"environment": name} if (name := trajectory.task.environment) else {}),
        "question": trajectory.query,
        "answers": list(trajectory.task.answers),
        "final_answer": trajectory.final_answer,
        "outcome": str(trajectory.outcome),
        "searches": trajectory.searches,
        **({"python_calls": trajectory.python_calls} if trajectory.python_calls else {}),
        **({"error": error} if error else {}),
        **({"images": _make_image_records(images)} if (images := trajectory.images) else {}),
        "num_sampled": trajectory.num_sampled,
        **({"usage": dict(trajectory.usage)} if trajectory.usage else {}),
        "response": trajectory.generated_text,
        **trajectory.reward_parts,
    }
