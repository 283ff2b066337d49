"""Detection of signs of collapse, and rollbacks to earlier checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxrl.training.method import Method, WatchSettings
from jaxrl.types import Group
from jaxrl.utils.callables import wrap_user_code
from jaxrl.utils.json_io import parse_json

DETECTORS: dict[str, str] = {"sentinel": "jaxrl.extras.sentinel.signs:detect_signs"}
"""Detectors by `watch.name`. Each maps a step and a state to the next state and a list of signs."""

ARGUMENTS = ("record", "groups", "state", "method", "step")
"""Arguments that a detector may take.

`record` holds the metrics of the step (`metrics.jsonl`) without times and memory, which differ
between processes. `groups` are the groups that the step trained on, with advantages. `state` is the
last state that the detector returned (plain JSON values, {} at first). `step` counts from 1 in the
stage.
"""

ACTIONS = ("warn", "lower_lr", "roll_back", "stop")
"""Reactions to a sign, mildest first."""

SIGN_COOLDOWN_STEPS = 10
"""Number of steps after which a repeated sign counts as new."""


class CollapseError(RuntimeError):
    """Error raised if the action for a sign of collapse is `stop`, or a rollback is impossible."""


@dataclass(kw_only=True, eq=False)
class Rollback(Exception):  # noqa: N818, the run continues
    """Request to return to an earlier checkpoint after a sign of collapse."""

    sign: str  # name of the sign
    from_step: int  # global step
    to_step: int  # global step with a checkpoint
    lr_scale: float  # factor on the learning rate after the rollback


@dataclass(frozen=True, kw_only=True)
class CollapseSign:
    """Sign of collapse in a step."""

    name: str  # lower case and underscores; the metric is `sentinel/NAME`
    text: str  # explanation with numbers, and advice
    since: int  # newest healthy step of the stage


@dataclass(frozen=True, kw_only=True)
class WatchState:
    """State of the watch between the steps of a stage, saved in checkpoints as JSON."""

    name: str = ""  # name of the detector; a new detector starts without state
    state: Mapping[str, Any] = field(default_factory=dict)  # returned by the detector
    # Last step of the stage with each sign.
    seen: Mapping[str, int] = field(default_factory=dict)
    acting: Sequence[Mapping[str, Any]] = ()  # signs of the newest step that need an action
    lr_scale: float = 1.0  # factor on the learning rate
    num_roll_backs: int = 0  # rollbacks of the stage so far


def check_step(
    method: Method,
    watch_state: WatchState,
    record: Mapping[str, Any],
    groups: Sequence[Group],
    step: int,
) -> tuple[WatchState, dict[str, float]]:
    """Check a step for signs of collapse; return the next state, and a metric of 1 for each sign.

    A sign seen fewer than `SIGN_COOLDOWN_STEPS` steps ago is recorded but causes no action.

    Args:
        method: Method whose `watch` is set.
        watch_state: State of the watch before the step.
        record: Metrics of the step, without its evaluation.
        groups: Groups that the step trained on.
        step: Step of the stage, from 1.

    Raises:
        UserCodeError: The detector failed, or did not return a state and a list of signs.
    """
    assert method.watch is not None
    detector = method.watch.detector
    if watch_state.name != detector.name:
        watch_state = replace(watch_state, name=detector.name, state={}, seen={})
    metrics = {"actor/lr_scale": watch_state.lr_scale}
    deterministic = {k: v for k, v in record.items() if not k.startswith(("timing_s/", "perf/"))}
    offered: dict[str, Any] = {
        "record": {**deterministic, **metrics},
        "groups": groups,
        "step": step,
    }
    offered |= {"state": watch_state.state, "method": method}

    def call_detector() -> tuple[dict[str, Any], list[CollapseSign]]:
        result = detector(*[offered[name] for name in detector.arguments])
        is_pair = isinstance(result, tuple) and [*map(type, result)] == [dict, list]
        if not is_pair or not all(isinstance(sign, CollapseSign) for sign in result[1]):
            raise TypeError(
                f"it returned {result!r:.80}; expected a dict and a list of CollapseSign"
            )
        plain = parse_json(json.dumps(result[0], allow_nan=False), "its state")
        return plain, result[1]

    state, signs = wrap_user_code(detector.key, detector.name, call_detector)()
    new = [
        s
        for s in signs
        if step - watch_state.seen.get(s.name, -SIGN_COOLDOWN_STEPS) >= SIGN_COOLDOWN_STEPS
    ]
    acting = [{"name": s.name, "text": s.text, "since": s.since} for s in new]
    seen = {**watch_state.seen, **{sign.name: step for sign in signs}}
    metrics |= {f"sentinel/{sign.name}": 1.0 for sign in signs}
    return replace(watch_state, state=state, seen=seen, acting=acting), metrics


def resolve_action(sign: Mapping[str, Any], watch: WatchSettings) -> str:
    """Return the action for a sign of collapse: its `watch.actions` entry, or `watch.action`."""
    return watch.actions.get(sign["name"], watch.action)


def rollback_target(
    sign: Mapping[str, Any], watch: WatchSettings, watch_state: WatchState, steps: Sequence[int]
) -> int:
    """Return the step of the newest healthy checkpoint, or else of the oldest checkpoint.

    Args:
        sign: Sign of collapse that triggered the rollback; `since` is the last healthy step.
        watch: Settings of the watch.
        watch_state: State of the watch, with the number of earlier rollbacks.
        steps: Steps of the stage that have a checkpoint.

    Raises:
        CollapseError: There is no checkpoint, or `watch.max_roll_backs` is reached.
    """
    why = f"{sign['name']}: {sign['text']}"
    if not steps or watch_state.num_roll_backs >= watch.max_roll_backs:
        raise CollapseError(
            f"{why} The run cannot roll back: it has {len(steps)} checkpoints of the stage "
            f"(config.checkpoint.every_steps) and has rolled back {watch_state.num_roll_backs} of "
            f"{watch.max_roll_backs} times (config.watch.max_roll_backs)."
        )
    return max((step for step in steps if step <= sign["since"]), default=min(steps))
