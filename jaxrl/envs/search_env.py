"""Search environment: the model calls a search engine and other tools, then answers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxrl.envs.base import (
    CallRecord,
    Env,
    Episode,
    Message,
    OutageError,
    Outcome,
    Prompt,
    Reward,
    StepResult,
    Task,
    ToolError,
)
from jaxrl.envs.protocol import MalformedCall, ParsedCall, Protocol, search_r1
from jaxrl.envs.rewards.qa import exact_match, f1
from jaxrl.envs.tools.base import InvalidCallError, Tool, build_chat_schema
from jaxrl.envs.tools.budget import Budget, get_call_records
from jaxrl.utils.concurrency import parallel_map


class SearchEnv(Env):
    """Environment for questions answered with a search engine and other tools.

    In the protocols of Search-R1 and BAPO, a turn ends with `</answer>`, which ends the episode, or
    with the closing tag of a tool, after which the result is inserted. Any other ending is
    malformed. If a turn closes a call that it never opened, the model continues without an
    observation.

    In Qwen's protocol, turns end without stop strings. Results are in the order of the calls; an
    invalid call gets an error message. The first turn without calls ends the episode. If that turn
    has no answer, the episode is malformed.

    An answer that says "I don't know" ends the episode as abstained.
    """

    stop_strings: tuple[str, ...] = ("</search>", "</answer>")
    reward_parts: tuple[str, ...] = ()  # set from the protocol

    def __init__(
        self,
        engine: Tool | None,
        *,
        tools: Sequence[Tool] = (),
        prompt: Prompt,
        max_turns: int,
        max_calls: int = 0,
        protocol: Callable[[Sequence[str]], Protocol] = search_r1,
        correct_by: str = "exact_match",
        budget: Budget | None = None,
    ) -> None:
        """Validate and store the settings.

        Args:
            engine: Search engine with the name `search`. None is allowed only in Qwen's protocol.
            tools: Other tools.
            prompt: Template of the initial chat messages.
            max_turns: Maximum number of turns with calls, including blank calls. One more turn with
                a call ends the episode as out of budget.
            max_calls: Maximum number of calls that reach a tool in an episode; 0 for no limit.
                Further calls get an error message.
            protocol: Function that maps the names of `tools` to the protocol.
            correct_by: Reward part that decides correctness. An episode is correct if the part is
                above 0; for the protocol-specific part, `Protocol.is_correct` decides.
            budget: Upper bound on the cost of an episode's calls. Exceeding it ends the episode.
        """
        # The protocol depends on the names of the tools.
        all_tools = [*([] if engine is None else [engine]), *tools]
        names = [tool.name for tool in all_tools]
        self._protocol = turn_protocol = build_protocol(protocol, names)
        self.reward_parts = turn_protocol.reward_parts
        # The chat template describes tools to the model. With tags, a call is plain text.
        if turn_protocol.in_template:
            self.stop_strings = ()
            self.chat_tools = tuple(build_chat_schema(tool) for tool in all_tools)
        else:
            for tool in tools:
                if not tool.takes_text:
                    raise ValueError(
                        f"the tool {tool.name!r} takes {', '.join(tool.parameters['properties'])}; "
                        "expected one that takes a text, since tags hold only text, or "
                        "config.env.search.protocol='qwen'."
                    )
            self.stop_strings = get_stop_strings(turn_protocol, [tool.name for tool in tools])
        self._tools = dict(zip(names, all_tools, strict=True))
        self._prompt = prompt
        self._max_turns, self._max_calls = max_turns, max_calls
        self._correct_by = correct_by
        self._budget = budget or Budget()

    def start(self, tasks: Sequence[Task]) -> list[list[Message]]:
        """Return the prompt of each task."""
        return [self._prompt.render_messages(task) for task in tasks]

    def step(self, episodes: Sequence[Episode], texts: Sequence[str]) -> list[StepResult]:
        """Return the reply to one turn per episode. Each tool receives its calls as one batch."""
        plans = [self._plan_calls(e, text) for e, text in zip(episodes, texts, strict=True)]
        calls: dict[str, list[_Call]] = {}
        for plan in plans:
            for call in plan if isinstance(plan, list) else ():
                if call.tool is not None:
                    calls.setdefault(call.tool.name, []).append(call)
        parallel_map(_run_calls, list(calls.values()), max_threads=len(self._tools))
        return [plan if isinstance(plan, StepResult) else self._build_reply(plan) for plan in plans]

    def _plan_calls(self, episode: Episode, text: str) -> StepResult | list[_Call]:
        """Parse a turn; return its tool calls, or the reply if no tool needs to be called."""
        parsed_turn = self._protocol.read(text, tuple(self._tools))
        if parsed_turn.is_answer:
            abstains = self._protocol.is_abstention(episode.response + text)
            return StepResult(outcome=Outcome.ABSTAINED if abstains else Outcome.ANSWERED)
        if parsed_turn.is_malformed:
            return StepResult(outcome=Outcome.MALFORMED)
        if not parsed_turn.calls:
            return StepResult()
        # Blank calls count too, since they get a result like the others.
        num_turns = sum(turn.observation is not None for turn in episode.turns)
        if num_turns >= self._max_turns:
            return StepResult(outcome=Outcome.OUT_OF_BUDGET)
        calls = [self._resolve_call(parsed_call) for parsed_call in parsed_turn.calls]
        if self._max_calls:
            num_remaining = self._max_calls - sum(
                len(get_call_records(turn)) for turn in episode.turns
            )
            for call in [call for call in calls if call.tool is not None][max(num_remaining, 0) :]:
                call.tool = None
                call.result = (
                    f"error: this call was not made: no call is left of the {self._max_calls} "
                    "allowed; answer now"
                )
        if not self._budget.allows(episode, [call.tool.name for call in calls if call.tool]):
            return StepResult(outcome=Outcome.OUT_OF_BUDGET)
        return calls

    def _resolve_call(self, parsed_call: ParsedCall | MalformedCall) -> _Call:
        """Look up the tool of a call. The result of an invalid call is an error message."""
        if isinstance(parsed_call, MalformedCall):
            return _Call(result=f"error: {parsed_call.reason}")
        tool = self._tools.get(parsed_call.tool)
        if tool is None:
            names = ", ".join(self._tools)
            return _Call(result=f"error: there is no tool '{parsed_call.tool[:100]}', only {names}")
        try:
            text = tool.encode_call(parsed_call.parse_arguments(tool.parameters))
        except InvalidCallError as error:
            return _Call(result=f"error: {error}")
        except ToolError as error:
            return _Call(result=error)
        except RecursionError:  # JSON that parses may still be too deep to serialize
            return _Call(result="error: the call is nested too deeply")
        return _Call(tool=tool, text=text) if text.strip() else _Call(result=tool.blank)

    def _build_reply(self, calls: list[_Call]) -> StepResult:
        """Build the reply from the results of a turn's calls, or from the first failure."""
        outputs, errors = [], []
        for result in [call.result for call in calls]:
            if isinstance(result, OutageError) and result.fallback is None:
                raise result
            is_failure = isinstance(result, ToolError)
            outputs.append(getattr(result, "fallback", None) if is_failure else result)
            errors += [str(result) or type(result).__name__] if is_failure else []
        results = [text for text in outputs if isinstance(text, str)]
        is_complete = len(results) == len(calls)
        records = tuple(
            dataclasses.replace(call.record, result_index=index)
            for index, call in enumerate(calls)
            if call.record is not None
        )
        return StepResult(
            observation=self._protocol.render_results(results) if is_complete else None,
            outcome=None if is_complete else Outcome.ENVIRONMENT_ERROR,
            tool_call=records[0].call if records else None,
            tool=records[0].tool if records else None,
            latency_s=max((record.waited_s for record in records), default=0.0),
            error=errors[0] if errors else None,
            records=records,
        )

    def score(self, group: Sequence[Episode]) -> list[Reward]:
        """Score the format of the response and its final answer. An abstention is never correct."""
        rewards, protocol = [], self._protocol
        for episode in group:
            task, response = episode.task, episode.response
            if not task.answers:
                raise ValueError(f"task {task.id!r} has no accepted answer; set its `answers`.")
            answer, abstains = protocol.final_answer(response), protocol.is_abstention(response)
            graded_answer = "" if abstains else answer
            parts = {
                "format": protocol.format_reward(response),
                protocol.correctness_name: protocol.correctness(response, task.answers),
                "exact_match": exact_match(graded_answer, task.answers),
                "f1": f1(graded_answer, task.answers),
            }
            is_correct = parts[self._correct_by] > 0
            # The config may set a positive reward for an incorrect answer.
            if self._correct_by == protocol.correctness_name:
                is_correct = protocol.is_correct(response, task.answers)
            reward = Reward(
                parts=parts,
                final_answer=answer,
                is_correct=is_correct,
                is_abstention=abstains,
                is_well_formed=protocol.is_well_formed(response),
            )
            rewards.append(reward)
        return rewards


@dataclass
class _Call:
    """Tool call and its result."""

    tool: Tool | None = None  # None if the call reaches no tool
    text: str = ""
    result: str | ToolError = ""  # the result or failure
    record: CallRecord | None = None  # None if no tool was called


def _run_calls(calls: list[_Call]) -> None:
    """Run the calls of one tool as a batch and store their results."""
    tool = calls[0].tool
    assert tool is not None
    answers = tool.call_batch([call.text for call in calls])
    for call, answer in zip(calls, answers, strict=True):
        call.result, call.record = answer.result, answer.record


def build_protocol(protocol: Callable[[Sequence[str]], Protocol], names: Sequence[str]) -> Protocol:
    """Build the protocol for these tools. In tag protocols, the search engine comes first.

    Raises:
        ValueError: A name is invalid or reserved, or a required tool is missing.
    """
    default_protocol = protocol(())
    pattern, reserved_names, tool_names = r"[A-Za-z_][\w.-]*", set(), names
    if not default_protocol.in_template:
        if names[:1] != ["search"]:
            problem = f"the search engine's name is {names[0]!r}" if names else "there is no tool"
            raise ValueError(f"{problem}; expected 'search'.")
        pattern, tool_names = r"[a-z]\w*", names[1:]
        reserved_names = {"search", *default_protocol.tags} - set(default_protocol.tools[1:])
    elif not names:
        raise ValueError(
            "there is no tool to call; name one in config.env.search.tools or "
            "config.env.search.mcp, or set config.search.engine."
        )
    for name in tool_names:
        if not re.fullmatch(pattern, name, re.ASCII) or name in reserved_names:
            raise ValueError(
                f"the tool name {name!r} is invalid or reserved; expected an identifier other than "
                f"{', '.join(sorted(reserved_names))}."
            )
        reserved_names.add(name)
    return protocol(tool_names)


def get_stop_strings(protocol: Protocol, names: Sequence[str]) -> tuple[str, ...]:
    """Return the protocol's stop strings and the closing tags of additional tools."""
    if protocol.in_template:
        return ()
    return (*protocol.stop_strings, *(f"</{name}>" for name in names))


def check_protocol(protocol: Protocol) -> None:
    """Check that `SearchEnv` can use a protocol.

    Raises:
        ValueError: A required stop string is missing, or `SearchEnv` cannot compute a reward part.
    """
    for end in () if protocol.in_template else ("</search>", "</answer>"):
        if end not in protocol.stop_strings:
            raise ValueError(
                f"its stop_strings lack {end!r}; expected both </search> and </answer>"
            )
    available_parts = ("format", protocol.correctness_name, "exact_match", "f1")
    for part in protocol.reward_parts:
        if part not in available_parts:
            raise ValueError(
                f"it has the reward part {part!r}; expected some of {', '.join(available_parts)}"
            )
