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
from jaxrl.envs.images import Picture, UnreadableImageError
from jaxrl.types import Group, Trajectory

ARRAYS = {
    "token_ids": np.int32,
    "loss_mask": bool,
    "rollout_logprobs": np.float32,
    "rollout_entropies": np.float32,
    "policy_versions": np.int32,
}


MEASURED = ("divergence", "windows", "custom_advantages")
"""Fields that are not saved, because the next step recomputes them with the new policy."""


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    """Convert a trajectory to JSON values.

    Arrays are encoded as base64 of their little-endian bytes. `MEASURED` and `attachments` are
    omitted; `Processor.with_images` restores the latter from the images.
    """
    known = [field.name for field in dataclasses.fields(trajectory)]
    omitted = (*MEASURED, "attachments", "token_arrays")  # `token_arrays` is added below
    fields = {name: getattr(trajectory, name) for name in known if name not in omitted}
    for name, dtype in ARRAYS.items():
        fields[name] = _encode_array(fields[name], dtype)
    for name, array in trajectory.token_arrays.items():
        data = _encode_array(array, array.dtype)
        saved = {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}
        fields.setdefault("token_arrays", {})[name] = saved
    task = dataclasses.asdict(dataclasses.replace(trajectory.task, images=()))
    task["images"] = list(map(_picture_to_json, trajectory.task.images))
    return fields | {
        "task": task,
        "turns": list(map(turn_to_json, trajectory.turns)),
        "reward_parts": dict(trajectory.reward_parts),
        "outcome": str(trajectory.outcome),
        "reward_records": reward_records_to_json(trajectory),
    }


def from_json(saved: Mapping[str, Any]) -> Trajectory:
    """Restore a trajectory from the output of `to_json`, without the omitted fields.

    Raises:
        UnreadableError: An image file is missing or has changed.
    """
    known = {field.name for field in dataclasses.fields(Trajectory)}
    fields = {name: value for name, value in saved.items() if name in known}
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
    task["images"] = _pictures_from_json(task)
    fields["task"] = Task(**task)
    fields["turns"] = tuple(map(_turn_from_json, fields["turns"]))
    fields["reward_records"] = _records_from_json(fields.get("reward_records", ()))
    for name in ("turn_starts", "turn_rewards", "turn_advantages"):
        if fields.get(name) is not None:  # absent in old checkpoints
            fields[name] = tuple(fields[name])
    fields["contexts"] = tuple(map(tuple, fields.get("contexts", ())))
    fields["outcome"] = Outcome(fields["outcome"])
    return Trajectory(**fields)


def _encode_array(array: np.ndarray, dtype: DTypeLike) -> str:
    data = np.ascontiguousarray(array, np.dtype(dtype).newbyteorder("<")).tobytes()
    return base64.b64encode(data).decode("ascii")


def _decode_array(text: str, dtype: DTypeLike) -> np.ndarray:
    array = np.frombuffer(base64.b64decode(text), np.dtype(dtype).newbyteorder("<"))
    return array.astype(dtype)


def _turn_from_json(saved: Mapping[str, Any]) -> Turn:
    records = _records_from_json(saved.get("records", ()))
    results = tuple(saved.get("results", ()))
    return Turn(
        **{**saved, "records": records, "results": results, "images": _pictures_from_json(saved)}
    )


def turn_to_json(turn: Turn) -> dict[str, Any]:
    """Convert a turn to JSON values. Omit rarely used fields that are empty."""
    plain = dataclasses.asdict(dataclasses.replace(turn, images=()))
    rare = {
        "images": list(map(_picture_to_json, turn.images)),
        "is_cut": turn.is_cut,
        "results": list(turn.results),
    }
    always = {name: value for name, value in plain.items() if name not in rare}
    return always | {name: value for name, value in rare.items() if value}


def _picture_to_json(picture: Picture) -> dict[str, str]:
    """Convert an image to its path and digest, or to base64 bytes if it has no file."""
    if picture.path:
        return {"path": picture.path, "digest": picture.digest}
    return {"data": base64.b64encode(picture.data).decode("ascii")}


def _pictures_from_json(saved: Mapping[str, Any]) -> tuple[Picture, ...]:
    return tuple(map(_picture_from_json, saved.get("images", ())))


def _picture_from_json(saved: Mapping[str, str]) -> Picture:
    if "data" in saved:
        return Picture(data=base64.b64decode(saved["data"]))
    picture = Picture(path=saved["path"])
    try:
        problem = "" if picture.digest == saved["digest"] else "was changed"
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
    if problem:
        raise UnreadableImageError(
            f"{picture.path}, with which the run sampled, {problem}; restore the image, or start a "
            "new run with another --workdir."
        )
    return picture


def _records_from_json(saved: Iterable[Mapping[str, Any]]) -> tuple[CallRecord, ...]:
    return tuple(CallRecord(**record) for record in saved)


def reward_records_to_json(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Convert the trajectory's judge calls to JSON values."""
    return [dataclasses.asdict(record) for record in trajectory.reward_records]


def groups_to_json(groups: Iterable[Group]) -> list[list[dict[str, Any]]]:
    """Convert the trajectories of each group with `to_json`."""
    return [[to_json(trajectory) for trajectory in group.trajectories] for group in groups]


def groups_from_json(saved: Iterable[Iterable[Mapping[str, Any]]]) -> list[Group]:
    """Restore groups from the output of `groups_to_json`."""
    return [Group(trajectories=tuple(map(from_json, group))) for group in saved]
