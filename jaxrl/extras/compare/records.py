"""Trajectories of a step, restored from the records that a run has written of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.envs.base import CallRecord, Outcome, Task, Turn
from jaxrl.envs.json_text import parse_json
from jaxrl.logs.records import RARE
from jaxrl.types import Group, Trajectory

ALL = "set config.log.trajectories=-1 in a run whose batches are to be compared"


def read_groups(run: Path, step: int, group_size: int) -> list[Group]:
    """The groups of a step, in its order.

    Args:
        run: a run's workdir.
        step: over all stages.
        group_size: trajectories that each group must have.

    Raises:
        FileNotFoundError: the run has written no trajectories of this step; names those it has.
        ValueError: a line is no record, or a group is not whole or of another size.
    """
    folder = run / "trajectories"
    file = folder / f"step_{step:06d}.jsonl"
    if not file.is_file():
        names = [re.fullmatch(r"step_(\d+)\.jsonl", path.name) for path in folder.glob("step_*")]
        steps = ", ".join(str(int(name[1])) for name in sorted(names, key=str) if name)
        raise FileNotFoundError(
            f"--step={step}: {folder} holds no trajectories of this step; it holds steps "
            f"{steps or 'of none'}."
        )
    groups: dict[int, list[Trajectory]] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            record = parse_json(line, "it")
            groups.setdefault(record["group_id"], []).append(restored(record))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}:{number} is no record of a trajectory: {error!r}.") from error
    if not groups:
        raise ValueError(f"{file} is empty; {ALL}.")
    for group in groups.values():
        task = group[0].task_id
        if len(group) > group_size:
            raise ValueError(
                f"{file} has a group of {len(group)} trajectories, of the task {task!r}; expected "
                f"groups of config.rollout.group_size={group_size}."
            )
        if len(group) < group_size:
            raise ValueError(
                f"{file} has only {len(group)} of the {group_size} trajectories of the task "
                f"{task!r}, and statistics of a part of a group would be wrong; {ALL}."
            )
    return [Group(trajectories=tuple(group)) for group in groups.values()]


def restored(record: Mapping[str, Any]) -> Trajectory:
    """The trajectory of a record, as far as advantages and losses depend on it.

    `rollout_logprobs` and `rollout_entropies` have the six digits of the record; images and arrays
    that a sampler has recorded by token are left out.
    """
    rare: dict[str, Any] = {
        name: tuple(record[name]) if isinstance(record[name], list) else record[name]
        for name in RARE
        if name in record
    }
    rare["contexts"] = tuple(map(tuple, rare.get("contexts", ())))
    return Trajectory(
        token_ids=np.array(record["token_ids"], np.int32),
        loss_mask=np.array(record["loss_mask"], bool),
        rollout_logprobs=np.array(record["rollout_logprobs"], np.float32),
        rollout_entropies=np.array(record["rollout_entropies"], np.float32),
        policy_versions=np.array(record["policy_versions"], np.int32),
        prompt_length=record["prompt_length"],
        sample_index=record["sample_index"],
        attempt=record["attempt"],
        task=Task(
            id=record["task_id"],
            question=record["question"],
            answers=tuple(record["answers"]),
            data_source=record["data_source"],
        ),
        turns=tuple(map(_turn, record["turns"])),
        outcome=Outcome(record["outcome"]),
        reward=record["reward"] or 0.0,  # null where the environment failed
        reward_parts=record["reward_parts"],
        final_answer=record["final_answer"],
        is_correct=record["is_correct"],
        advantage=record["advantage"],
        **rare,
    )


def _turn(saved: Mapping[str, Any]) -> Turn:
    records = tuple(CallRecord(**record) for record in saved["records"])
    return Turn(**{**saved, "records": records, "images": ()})
