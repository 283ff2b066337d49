"""Signs that training is about to fail: who looks for them at each step, and what follows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from jaxrl.training.method import Method, Watch
from jaxrl.types import Group
from jaxrl.utils.callables import wrap_user_code
from jaxrl.utils.json_io import parse_json

WATCHES: dict[str, str] = {"sentinel": "jaxrl.extras.sentinel.signs:judge"}
"""Functions by `watch.name`: from a step, and a state of its own, to its next state and signs."""

ARGUMENTS = ("record", "groups", "state", "method", "step")
"""Arguments such a function may ask for: the metrics of the step (`metrics.jsonl`) without those of
clocks and memory, which processes differ in; the groups that it trained on with their advantages;
what the function returned as its state after the step before (plain JSON values; {} at first); the
method; the step's number in the stage, from 1."""

ACTIONS = ("warn", "lower_lr", "roll_back", "stop")
"""Consequences of a sign, mildest first."""

FORGOTTEN_AFTER = 10
"""Steps without a sign after which it counts as new again."""


class UnsoundError(RuntimeError):
    """A run that `watch.action` ends, since one of its steps had a sign of collapse."""


@dataclass(kw_only=True, eq=False)
class RollBack(Exception):  # noqa: N818, the run goes on
    """Raised where a run is to go back to an earlier checkpoint.

    Attributes:
        sign: why, by its name.
        from_step, to_step: over all stages; of the second there is a checkpoint.
        lr_scale: factor of the learning rate from there on.
    """

    sign: str
    from_step: int
    to_step: int
    lr_scale: float


@dataclass(frozen=True, kw_only=True)
class Sign:
    """A sign that a step is not sound.

    Attributes:
        name: of the metric `sentinel/NAME`, in small letters and underscores.
        text: what is happening, with its numbers, and what to change.
        since: the newest step of the stage that was still sound.
    """

    name: str
    text: str
    since: int

    def __post_init__(self) -> None:
        """Checks what is put into metrics and checkpoints."""
        is_name = isinstance(self.name, str) and re.fullmatch("[a-z][a-z0-9_]*", self.name)
        if not is_name or not isinstance(self.text, str) or type(self.since) is not int:
            raise TypeError(
                f"a Sign came with name={self.name!r}, text={self.text!r:.40}, "
                f"since={self.since!r}; expected small letters, digits and underscores, a text, "
                "and a number of steps"
            )


@dataclass(frozen=True, kw_only=True)
class Watched:
    """State of a watch between the steps of a stage, saved in checkpoints as JSON.

    Attributes:
        name: of the function; another one begins with no state.
        state: the function's own.
        seen: the step of the stage at which each sign was seen last.
        acting: signs of the newest step that have not been acted on, as JSON has them.
        lr_scale: factor of the learning rate.
        num_roll_backs: times the stage went back to an earlier checkpoint.
    """

    name: str = ""
    state: Mapping[str, Any] = field(default_factory=dict)
    seen: Mapping[str, int] = field(default_factory=dict)
    acting: Sequence[Mapping[str, Any]] = ()
    lr_scale: float = 1.0
    num_roll_backs: int = 0

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Watched:
        """The inverse of `dataclasses.asdict`; fields of other versions are left out."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in saved.items() if name in known})


def look(
    method: Method, watched: Watched, record: Mapping[str, Any], groups: Sequence[Group], step: int
) -> tuple[Watched, dict[str, float]]:
    """Looks at a step; returns the next state, and metrics with a 1 for each sign.

    A sign that was there less than `FORGOTTEN_AFTER` steps ago is measured and not acted on.

    Args:
        method: with its `watch`.
        watched: the state before the step.
        record: the step's metrics, without its evaluation.
        groups: that it trained on.
        step: of the stage, this one counted.

    Raises:
        UserCodeError: a function of one's own failed, or returned something else.
    """
    assert method.watch is not None
    judge = method.watch.judge
    if watched.name != judge.name:
        watched = replace(watched, name=judge.name, state={}, seen={})
    metrics = {"actor/lr_scale": watched.lr_scale}
    alike = {k: v for k, v in record.items() if not k.startswith(("timing_s/", "perf/"))}
    offered: dict[str, Any] = {"record": {**alike, **metrics}, "groups": groups, "step": step}
    offered |= {"state": watched.state, "method": method}

    def checked() -> tuple[dict[str, Any], list[Sign]]:
        judged = judge(*[offered[name] for name in judge.arguments])
        is_pair = isinstance(judged, tuple) and [*map(type, judged)] == [dict, list]
        if not is_pair or not all(isinstance(sign, Sign) for sign in judged[1]):
            raise TypeError(f"it returned {judged!r:.80}; expected a dict and a list of Sign")
        plain = parse_json(json.dumps(judged[0], allow_nan=False), "its state")
        return plain, judged[1]

    state, signs = wrap_user_code(judge.key, judge.name, checked)()
    new = [s for s in signs if step - watched.seen.get(s.name, -FORGOTTEN_AFTER) >= FORGOTTEN_AFTER]
    acting = [{"name": s.name, "text": s.text, "since": s.since} for s in new]
    seen = {**watched.seen, **{sign.name: step for sign in signs}}
    metrics |= {f"sentinel/{sign.name}": 1.0 for sign in signs}
    return replace(watched, state=state, seen=seen, acting=acting), metrics


def action_on(sign: Mapping[str, Any], watch: Watch) -> str:
    """The action that a sign asks for."""
    return watch.actions.get(sign["name"], watch.action)


def goal_of(sign: Mapping[str, Any], watch: Watch, watched: Watched, steps: Sequence[int]) -> int:
    """The step to go back to: the newest checkpoint that was still sound, else the oldest.

    Args:
        sign: for which to go back.
        watch: says how often that may be.
        watched: says how often it was.
        steps: of the stage, at which there are checkpoints.

    Raises:
        UnsoundError: there is none, or the run went back too often already.
    """
    why = f"{sign['name']}: {sign['text']}"
    if watched.num_roll_backs >= watch.max_roll_backs:
        raise UnsoundError(
            f"{why} The run has gone back {watched.num_roll_backs} times, as often as "
            "config.watch.max_roll_backs allows."
        )
    if not steps:
        raise UnsoundError(
            f"{why} There is no checkpoint of the stage to go back to; lower "
            "config.checkpoint.every_steps."
        )
    return max((step for step in steps if step <= sign["since"]), default=min(steps))
