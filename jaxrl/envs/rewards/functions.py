"""Calling conventions of user reward functions, detected from parameter names.

There are four calling conventions: a response and the accepted answers, an episode's turns, verl's,
and TRL's. Each function is called by keyword with the arguments that its signature accepts.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

from jaxrl.envs.base import Episode, Message, Reward, ScoredEpisode, Task
from jaxrl.envs.rewards.combiner import RewardPartCall, RewardPartResult, to_number


@dataclass(frozen=True, kw_only=True)
class CallingConvention:
    """Calling convention of reward functions.

    Attributes:
        label: Signature for error messages.
        arguments: Function that returns, for each call for a group, the indices of its episodes
            and the available arguments.
        parse: Function that converts a part's name, result and episodes to one `RewardPartResult`
            per episode.
    """

    label: str
    arguments: Callable[
        [Sequence[ScoredEpisode], bool], list[tuple[tuple[int, ...], dict[str, Any]]]
    ]
    parse: Callable[[str, Any, Sequence[ScoredEpisode]], list[RewardPartResult]]


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """Reward part computed by a user function.

    Attributes:
        name: Name of the part.
        function: Sync or async function.
        convention: Calling convention of the function.
        settings: Keyword arguments from the config.
        answer_is_text: True to pass the first answer as `ground_truth` to verl's functions, False
            to pass `{"target": [all answers]}`. Ignored for tasks with a `ground_truth`.
    """

    name: str
    function: Callable[..., Any]
    convention: CallingConvention
    settings: Mapping[str, Any] = field(default_factory=dict)
    answer_is_text: bool = False

    @property
    def is_async(self) -> bool:
        """True if calls return coroutines."""
        inner = getattr(self.function, "__call__", None)  # noqa: B004, for callable objects
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(inner)

    def requests(self, group: Sequence[ScoredEpisode]) -> list[RewardPartCall]:
        """Return one call per episode, or one call per group, depending on the convention."""
        parameters = inspect.signature(self.function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        calls = []
        for members, available in self.convention.arguments(group, self.answer_is_text):
            accepted = {
                name: value
                for name, value in available.items()
                if (takes_all or name in parameters) and name not in self.settings
            }
            invoke = partial(self.function, **accepted, **self.settings)
            parse = partial(self._parse_result, [group[i] for i in members])
            calls.append(RewardPartCall(members=members, invoke=invoke, parse=parse))
        return calls

    def missing_fields(self, task: Task) -> list[str]:
        """Return the names of required arguments that the task lacks."""
        blank = ScoredEpisode(episode=Episode(task=task), reward=Reward(parts={}, final_answer=""))
        [(_, available)] = self.convention.arguments([blank], self.answer_is_text)
        known = {**available, **self.settings}
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return [
            p.name
            for p in inspect.signature(self.function).parameters.values()
            if p.kind in kinds and p.default is p.empty and p.name not in known
        ]

    def _parse_result(
        self, episodes: Sequence[ScoredEpisode], result: Any
    ) -> list[RewardPartResult]:
        return self.convention.parse(self.name, result, episodes)


def build_reward_part(
    name: str, function: Any, *, part: str, settings: Mapping[str, Any], answer_is_text: bool
) -> RewardFunction:
    """Build a reward part from a function named in `config.reward.weights`.

    Args:
        name: Dotted path of the function.
        function: Object at that path.
        part: Name of the part.
        settings: Keyword arguments from `config.reward.settings`.
        answer_is_text: See `RewardFunction`.

    Raises:
        ValueError: The object follows no known convention, or does not accept a setting.
    """
    # Classes and generator functions are callable, but do not return a reward.
    convention, label = None, f"a {type(function).__name__}"
    if callable(function) and not isinstance(function, type):
        try:
            convention = detect_convention(function)
            label = f"a function of {inspect.signature(function)}"
        except (TypeError, ValueError) as error:  # a builtin without a signature
            label = str(error)
    if convention is None or inspect.isgeneratorfunction(function):
        labels = [convention.label for convention in CALLING_CONVENTIONS.values()]
        expected = "; or ".join(reversed(labels))
        raise ValueError(
            f"config.reward.weights names {name!r}, {label}; expected a function {expected}."
        )
    # Catch misspelled settings before the run starts.
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = next((setting for setting in settings if setting not in parameters), None)
    if unknown is not None and not takes_all:
        raise ValueError(
            f"config.reward.settings gives {name!r} the argument {unknown!r}, which it does not "
            f"accept; it accepts {', '.join(parameters)}."
        )
    return RewardFunction(
        name=part,
        function=function,
        convention=convention,
        settings=settings,
        answer_is_text=answer_is_text,
    )


def detect_convention(function: Callable[..., Any]) -> CallingConvention | None:
    """Detect the calling convention from parameter names; return None if none matches."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters):
        return None
    names = {p.name for p in parameters}
    return next((value for name, value in CALLING_CONVENTIONS.items() if name in names), None)


Arguments = list[tuple[tuple[int, ...], dict[str, Any]]]


def _list_arguments_per_episode(
    group: Sequence[ScoredEpisode], arguments: Callable[[ScoredEpisode], dict[str, Any]]
) -> Arguments:
    return [((index,), arguments(item)) for index, item in enumerate(group)]


def _to_list(name: str, result: Any, count: int, unit: str) -> list[Any]:
    """Convert a reward function's return value to a list of `count` values, one per `unit`.

    Raises:
        ValueError: The result is not a list, tuple or array of `count` values.
    """
    is_list = isinstance(result, list | tuple) or getattr(result, "ndim", 0) == 1
    if not is_list or len(result) != count:
        raise ValueError(
            f"the reward part {name!r} returned {result!r:.200}; expected a list of {count} "
            f"values, one per {unit}"
        )
    return list(result)


def _parse_turns(
    name: str, result: Any, episodes: Sequence[ScoredEpisode]
) -> list[RewardPartResult]:
    [item] = episodes
    values = _to_list(name, result, len(item.episode.turns), "turn")
    turn_scores = tuple(to_number(name, value) for value in values)
    return [RewardPartResult(score=math.fsum(turn_scores), turns=turn_scores)]


def get_ground_truth(task: Task, answer_is_text: bool) -> Any:
    """Return verl's `ground_truth`: `reward_model.ground_truth` if set, else the task's answers.

    The answers have the form `{"target": [..]}`, as in verl's question-answering datasets, unless
    `answer_is_text`. Then only the first answer is returned, as in verl's math datasets.
    """
    model = task.metadata.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
        return copy.deepcopy(model["ground_truth"])
    if answer_is_text:
        return task.answers[0] if task.answers else ""
    return {"target": list(task.answers)}


def _list_verl_arguments(group: Sequence[ScoredEpisode], answer_is_text: bool) -> Arguments:
    def make_arguments(item: ScoredEpisode) -> dict[str, Any]:
        task = item.episode.task
        return {
            "data_source": task.data_source,
            "solution_str": item.episode.response,
            "ground_truth": get_ground_truth(task, answer_is_text),
            "extra_info": copy.deepcopy(task.metadata.get("extra_info", dict(task.metadata))),
        }

    return _list_arguments_per_episode(group, make_arguments)


def _parse_verl_result(
    name: str, result: Any, _: Sequence[ScoredEpisode]
) -> list[RewardPartResult]:
    if not isinstance(result, Mapping):
        return [RewardPartResult(score=to_number(name, result))]
    if "score" not in result:
        raise ValueError(
            f"the reward part {name!r} returned the keys {', '.join(map(repr, result)) or 'none'}; "
            "expected the key 'score'"
        )
    extra_values = {}
    for key, value in result.items():
        # Other values are not numbers and cannot be logged.
        is_scalar = getattr(value, "shape", ()) == () and callable(getattr(value, "item", None))
        if key != "score" and isinstance(value.item() if is_scalar else value, Real):
            extra_values[str(key)] = to_number(f"{name}/{key}", value)
    return [RewardPartResult(score=to_number(name, result["score"]), extra_values=extra_values)]


def _list_trl_arguments(group: Sequence[ScoredEpisode], _: bool) -> Arguments:
    task = group[0].episode.task
    is_chat = task.messages is not None
    columns = {
        **{"id": task.id, "data_source": task.data_source, "answers": list(task.answers)},
        **({"answer": task.answers[0]} if task.answers else {}),
        **({} if is_chat else {"question": task.question}),
        **task.metadata,
    }
    available = {name: [copy.deepcopy(value) for _ in group] for name, value in columns.items()}
    prompt = [dict(m) for m in task.messages or ()] if is_chat else task.question
    available |= {
        "prompts": [copy.deepcopy(prompt) for _ in group],
        "completions": [
            build_completion_messages(item) if is_chat else item.episode.response for item in group
        ],
        "completion_ids": [list(item.completion_ids) for item in group],
    }
    return [(tuple(range(len(group))), available)]


def build_completion_messages(item: ScoredEpisode) -> list[Message]:
    """Return the turns of an episode as assistant and tool messages."""
    messages: list[Message] = []
    for index, turn in enumerate(item.episode.turns):
        opener = item.episode.opener if index == 0 else ""
        messages.append({"role": "assistant", "content": opener + turn.text})
        if turn.observation is not None:
            messages.append({"role": "tool", "content": turn.observation})
    return messages


def _parse_trl(name: str, result: Any, episodes: Sequence[ScoredEpisode]) -> list[RewardPartResult]:
    values = _to_list(name, result, len(episodes), "completion")
    return [
        RewardPartResult(score=None if item is None else to_number(name, item)) for item in values
    ]


CALLING_CONVENTIONS: dict[str, CallingConvention] = {
    "completions": CallingConvention(
        label="f(prompts, completions, completion_ids, **columns) as TRL calls it",
        arguments=_list_trl_arguments,
        parse=_parse_trl,
    ),
    "solution_str": CallingConvention(
        label="compute_score(data_source, solution_str, ground_truth, extra_info) as verl calls it",
        arguments=_list_verl_arguments,
        parse=_parse_verl_result,
    ),
    "turns": CallingConvention(
        label="f(turns, answers), which returns a list with a value for each turn",
        arguments=lambda group, _: _list_arguments_per_episode(
            group, lambda x: {"turns": tuple(x.episode.turns), "answers": x.episode.task.answers}
        ),
        parse=_parse_turns,
    ),
    "response": CallingConvention(
        label="f(response, answers)",
        arguments=lambda group, _: _list_arguments_per_episode(
            group, lambda x: {"response": x.episode.response, "answers": x.episode.task.answers}
        ),
        parse=lambda name, result, _: [RewardPartResult(score=to_number(name, result))],
    ),
}
"""Calling conventions by identifying parameter, in order of precedence."""
