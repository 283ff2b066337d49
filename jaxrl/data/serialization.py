"""Lossless JSON serialization of trajectories, for checkpoints and transfer between processes.

`logs.records` writes the human-readable format.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from jaxrl.envs.base import CallRecord, Outcome, Task, Turn
from jaxrl.envs.images import Picture, UnreadableImageError, Video
from jaxrl.types import Group, Trajectory

ARRAYS = {
    "token_ids": np.int32,
    "loss_mask": bool,
    "rollout_logprobs": np.float32,
    "rollout_entropies": np.float32,
    "policy_versions": np.int32,
}


RECOMPUTED_FIELDS = ("divergence", "windows", "custom_advantages")
"""Fields that are not saved, because the next step recomputes them under the new policy."""


def serialize_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """Convert a trajectory to JSON values.

    Arrays are encoded as base64 of their little-endian bytes. `RECOMPUTED_FIELDS` are omitted. So
    are `attachments`, because `ImageProcessor.reload_images` restores them from the images.
    """
    names = [field.name for field in dataclasses.fields(trajectory)]
    omitted = (*RECOMPUTED_FIELDS, "attachments", "token_arrays")  # `token_arrays` is added below
    fields = {name: getattr(trajectory, name) for name in names if name not in omitted}
    for name, dtype in ARRAYS.items():
        fields[name] = _encode_array(fields[name], dtype)
    for name, array in trajectory.token_arrays.items():
        data = _encode_array(array, array.dtype)
        saved = {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}
        fields.setdefault("token_arrays", {})[name] = saved
    task = dataclasses.asdict(dataclasses.replace(trajectory.task, images=()))
    task["images"] = list(map(_serialize_image, trajectory.task.images))
    if not task["environment"]:
        del task["environment"]
    return fields | {
        "task": task,
        "turns": list(map(serialize_turn, trajectory.turns)),
        "reward_parts": dict(trajectory.reward_parts),
        "outcome": str(trajectory.outcome),
        "reward_records": serialize_reward_records(trajectory),
    }


def deserialize_trajectory(saved: Mapping[str, Any]) -> Trajectory:
    """Restore a trajectory from the output of `serialize_trajectory`.

    Raises:
        UnreadableImageError: An image file is missing or has changed.
    """
    fields = dict(saved)
    for name, dtype in ARRAYS.items():
        fields[name] = _decode_array(fields[name], dtype)
    if token_arrays := fields.get("token_arrays"):
        fields["token_arrays"] = {
            name: _decode_array(array["data"], array["dtype"]).reshape(array["shape"])
            for name, array in token_arrays.items()
        }
    task = dict(fields["task"])
    task["answers"] = tuple(task["answers"])
    task["messages"] = None if task["messages"] is None else tuple(task["messages"])
    task["images"] = _deserialize_images(task)
    fields["task"] = Task(**task)
    fields["turns"] = tuple(map(_deserialize_turn, fields["turns"]))
    fields["reward_records"] = _deserialize_records(fields["reward_records"])
    for name in ("turn_starts", "turn_rewards", "turn_advantages"):
        if fields[name] is not None:
            fields[name] = tuple(fields[name])
    fields["contexts"] = tuple(map(tuple, fields["contexts"]))
    fields["outcome"] = Outcome(fields["outcome"])
    return Trajectory(**fields)


def _encode_array(array: np.ndarray, dtype: DTypeLike) -> str:
    data = np.ascontiguousarray(array, np.dtype(dtype).newbyteorder("<")).tobytes()
    return base64.b64encode(data).decode("ascii")


def _decode_array(text: str, dtype: DTypeLike) -> np.ndarray:
    array = np.frombuffer(base64.b64decode(text), np.dtype(dtype).newbyteorder("<"))
    return array.astype(dtype)


def _deserialize_turn(saved: Mapping[str, Any]) -> Turn:
    records = _deserialize_records(saved["records"])
    results = tuple(saved.get("results", ()))
    return Turn(
        **{**saved, "records": records, "results": results, "images": _deserialize_images(saved)}
    )


def serialize_turn(turn: Turn) -> dict[str, Any]:
    """Convert a turn to JSON values, without rarely used fields that are empty."""
    plain = dataclasses.asdict(dataclasses.replace(turn, images=()))
    rare = {
        "images": list(map(_serialize_image, turn.images)),
        "is_cut": turn.is_cut,
        "results": list(turn.results),
    }
    always = {name: value for name, value in plain.items() if name not in rare}
    return always | {name: value for name, value in rare.items() if value}


def _serialize_image(image: Picture) -> dict[str, Any]:
    """Convert an image to its path and digest, or to base64 bytes if it has no file."""
    if isinstance(image, Video) and image.frames:
        return {"frames": list(map(_serialize_image, image.frames)), "fps": image.fps}
    kind = {"is_video": True} if isinstance(image, Video) else {}
    if image.path:
        return {"path": image.path, "digest": image.digest, **kind}
    return {"data": base64.b64encode(image.data).decode("ascii"), **kind}


def _deserialize_images(saved: Mapping[str, Any]) -> tuple[Picture, ...]:
    return tuple(map(_deserialize_image, saved.get("images", ())))


def _deserialize_image(saved: Mapping[str, Any]) -> Picture:
    if "frames" in saved:
        return Video(frames=tuple(map(_deserialize_image, saved["frames"])), fps=saved["fps"])
    file_type = Video if saved.get("is_video") else Picture
    if "data" in saved:
        return file_type(data=base64.b64decode(saved["data"]))
    image = file_type(path=saved["path"])
    try:
        problem = "" if image.digest == saved["digest"] else "was changed"
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
    if problem:
        raise UnreadableImageError(
            f"{image.path}, which the run used for sampling, {problem}; restore it, or start a "
            "new run with another --workdir."
        )
    return image


def _deserialize_records(saved: Iterable[Mapping[str, Any]]) -> tuple[CallRecord, ...]:
    return tuple(CallRecord(**record) for record in saved)


def serialize_reward_records(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Convert the trajectory's judge calls to JSON values."""
    return [dataclasses.asdict(record) for record in trajectory.reward_records]


def serialize_groups(groups: Iterable[Group]) -> list[list[dict[str, Any]]]:
    """Convert the trajectories of each group with `serialize_trajectory`."""
    return [
        [serialize_trajectory(trajectory) for trajectory in group.trajectories] for group in groups
    ]


def deserialize_groups(saved: Iterable[Iterable[Mapping[str, Any]]]) -> list[Group]:
    """Restore groups from the output of `serialize_groups`."""
    return [Group(trajectories=tuple(map(deserialize_trajectory, group))) for group in saved]
