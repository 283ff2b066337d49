r"""Protocols for turns with tool calls: parsing turns and rendering results.

In the protocols of Search-R1 (https://arxiv.org/abs/2503.09516) and BAPO
(https://arxiv.org/abs/2601.11037), the model thinks in `<think>`, calls a tool in a tag with the
tool's name, such as `<search>`, and ends with `<answer>`. Results are in `<information>` or
`<result>`. BAPO's final answer is in `\boxed{..}`.

In Qwen's protocol (https://qwen.readthedocs.io/en/latest/framework/function_call.html), calls are
in `<tool_call>`, any number per turn: JSON in Qwen2.5 and Qwen3, and a `<function=NAME>` with a
`<parameter=NAME>` for each argument in Qwen3-Coder and Qwen3.5. The chat template describes tools
and renders results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxrl.envs.base import Observation, ToolResults
from jaxrl.envs.images import get_attached_images
from jaxrl.envs.rewards.qa import exact_match
from jaxrl.envs.rewards.rules import (
    compute_bapo_correctness,
    extract_boxed_answer,
    follows_bapo_format,
    is_abstention,
    is_refusal,
)
from jaxrl.envs.rewards.search_r1 import (
    compute_search_r1_reward,
    follows_search_r1_format,
    is_close_answer,
    remove_think_blocks,
)


@dataclass(frozen=True, kw_only=True)
class ParsedCall:
    """Parsed tool call, with plain text or JSON arguments. The tool may not exist.

    Attributes:
        tool: Name of the tool.
        arguments: Plain text, or the value of each argument.
        has_types: False if every value is text, regardless of the type that the tool expects.
    """

    tool: str
    arguments: str | Mapping[str, Any]
    has_types: bool = True

    def parse_arguments(self, schema: Mapping[str, Any]) -> str | Mapping[str, Any]:
        """Return the arguments, with untyped text parsed as JSON unless the schema allows a string.

        Text that is not JSON is unchanged. `True`, `False` and `None` are also parsed, because chat
        templates write them.

        Args:
            schema: JSON schema of the tool's arguments.

        Raises:
            RecursionError: An argument is nested too deeply.
        """
        if self.has_types or isinstance(self.arguments, str):
            return self.arguments
        properties = schema.get("properties")
        schemas = properties if isinstance(properties, Mapping) else {}
        return {
            name: text if _allows_string(schemas.get(name)) else _parse_value(text)
            for name, text in self.arguments.items()
        }


def _allows_string(schema: Any) -> bool:
    match schema:
        case {"type": "string"}:
            return True
        case {"type": [*kinds]}:
            return "string" in kinds
        case {"anyOf": [*options]} | {"oneOf": [*options]}:
            return any(map(_allows_string, options))
    return False


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


@dataclass(frozen=True, kw_only=True)
class MalformedCall:
    """Call that cannot be parsed."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class ParsedTurn:
    """Tool calls and status of a model turn.

    `calls` is empty for an answer, a malformed turn, and a closing tag without an opening tag.
    """

    calls: tuple[ParsedCall | MalformedCall, ...] = ()
    is_answer: bool = False  # ends the episode
    is_malformed: bool = False  # ends the episode


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Syntax of turns, and the rewards for following it.

    Attributes:
        name: Key in `PROTOCOLS`.
        tags: All tags. `sanitize` removes their angle brackets from untrusted text.
        tools: Names of the tools; in tag protocols, also their tags.
        stop_strings: Strings that end a turn when the search engine is the only tool.
        result_prefix: Text before a tool's result.
        result_suffix: Text after a tool's result.
        final_answer: Function that extracts the final answer of a response, or "".
        is_well_formed: Predicate that checks whether a response follows the protocol.
        format_reward: Function that computes the format reward of a response.
        reward_parts: Names of the reward parts that an environment computes.
        correctness_name: Name of the correctness reward part, which is specific to this protocol.
        correctness: Function that computes that part from a response and the accepted answers.
        is_correct: Predicate that checks a response against the accepted answers.
        read: Function that parses the text of a turn, given the names of the tools.
        is_abstention: Predicate that checks whether a response answers "I don't know".
        in_template: True if the chat template describes tools and renders results, and turns end
            without stop strings.
    """

    name: str
    tags: tuple[str, ...]
    tools: tuple[str, ...]
    stop_strings: tuple[str, ...]
    result_prefix: str
    result_suffix: str
    final_answer: Callable[[str], str]
    is_well_formed: Callable[[str], bool]
    format_reward: Callable[[str], float]
    reward_parts: tuple[str, ...]
    correctness_name: str
    correctness: Callable[[str, Sequence[str]], float]
    is_correct: Callable[[str, Sequence[str]], bool]
    read: Callable[[str, Sequence[str]], ParsedTurn] = lambda turn, tools: parse_tags(turn, tools)
    is_abstention: Callable[[str], bool] = is_abstention
    in_template: bool = False

    def sanitize(self, text: str) -> str:
        """Replace the angle brackets of protocol tags in untrusted text with ‹ and ›.

        Covers opening, closing and self-closing tags, in any case and with whitespace inside.
        Lone surrogates become "?".
        """
        names = "|".join(self.tags)
        tag = re.compile(rf"<(\s*(?:/\s*)?(?:{names})\s*(?:/\s*)?)>", re.IGNORECASE)
        return tag.sub(r"‹\1›", text).encode("utf-8", "replace").decode("utf-8")

    def render_observation(self, body: str) -> Observation:
        """Sanitize the result of a call and wrap it in the protocol's tags."""
        return Observation(
            prefix=self.result_prefix, body=self.sanitize(body), suffix=self.result_suffix
        )

    def render_results(self, results: Sequence[str]) -> Observation | ToolResults:
        """Render the results of a turn's calls. Tag protocols allow only one result."""
        images = tuple(map(get_attached_images, results))
        if self.in_template:
            shown = images if any(images) else ()
            return ToolResults(bodies=tuple(map(self.sanitize, results)), images=shown)
        return dataclasses.replace(self.render_observation(*results), images=images[0])


def parse_tags(turn: str, tools: Sequence[str]) -> ParsedTurn:
    """Parse a turn of a tag protocol. A turn that does not end with a closing tag is malformed."""
    if turn.endswith("</answer>"):
        return ParsedTurn(is_answer=True)
    tool = next((name for name in tools if turn.endswith(f"</{name}>")), None)
    if tool is None:
        return ParsedTurn(is_malformed=True)
    query = extract_last_query(turn, tool)
    return ParsedTurn(calls=() if query is None else (ParsedCall(tool=tool, arguments=query),))


def mask_call_arguments(text: str) -> str:
    """Replace `<` with `‹` inside the arguments of calls, so that tags there are not parsed.

    Changes only a JSON object after `<tool_call>`, or the parameter values in a complete
    `<function=NAME>` block. The length of the text stays the same.
    """
    pieces, position = [], 0
    while candidate := _CALL_JSON.search(text, position):
        start = end = candidate.start(1)
        with contextlib.suppress(ValueError, RecursionError):
            end = start + _JSON.raw_decode(candidate[1])[1]
        pieces += [text[position:start], text[start:end].replace("<", "‹")]
        position = end
    masked = "".join([*pieces, text[position:]])
    return _CALL_FUNCTION.sub(lambda call: _PARAMETER.sub(_mask_value, call[0]), masked)


def _mask_value(parameter: re.Match[str]) -> str:
    value = parameter[2].replace("<", "‹")
    return f"<parameter={parameter[1]}>{value}</parameter>"


# JSON has no `<` outside strings, and an object starts with a string. The pattern stops at a `<`
# outside strings, so that matching takes linear time.
_CALL_JSON = re.compile(
    r'<tool_call>\s*+(\{(?=\s*+["}])(?:[^"<]++|"(?:[^"\\]++|\\.)*+")*+)', re.DOTALL
)
_JSON = json.JSONDecoder()

# A value ends at `</parameter>` and cannot hold the tags of calls.
_PARAMETER = re.compile(
    r"<parameter=([^<>\n]++)>((?:[^<]++|<(?!/parameter>|/?tool_call>))*+)</parameter>"
)
_FUNCTION = re.compile(rf"<function=([^<>\n]++)>((?:\s*+{_PARAMETER.pattern})*+)\s*+</function>")
_CALL_FUNCTION = re.compile(rf"<tool_call>\s*+{_FUNCTION.pattern}(?=\s*+</tool_call>)")


def parse_tool_calls(turn: str, tools: Sequence[str] = ()) -> ParsedTurn:
    """Parse a turn in Qwen's format, ignoring calls inside thoughts.

    Each `<tool_call>` must contain a `<function=NAME>` or a JSON object with a name and an object
    of arguments. An unclosed call, or a call with other content, becomes a `MalformedCall`. A turn
    without calls ends the episode.
    """
    masked = mask_call_arguments(turn)
    begin, end = _find_visible_span(masked)
    calls: list[ParsedCall | MalformedCall] = []
    start = masked.find("<tool_call>", begin, end)
    while start >= 0:
        start += len("<tool_call>")
        stop = masked.find("</tool_call>", start, end)
        if stop < 0:
            calls.append(MalformedCall(reason="a call is not closed"))
            break
        calls.append(parse_call(turn[start:stop]))
        start = masked.find("<tool_call>", stop, end)
    if calls:
        return ParsedTurn(calls=tuple(calls))
    has_answer = "</answer>" in masked[begin:end].partition("<answer>")[2]
    return ParsedTurn(is_answer=has_answer, is_malformed=not has_answer)


def parse_call(text: str) -> ParsedCall | MalformedCall:
    """Parse the text between `<tool_call>` and `</tool_call>`."""
    if text.lstrip().startswith("<function="):
        return _parse_function(text.strip())
    try:
        call = json.loads(text, parse_constant=_reject_constant)
    except RecursionError:
        return MalformedCall(reason="the call is nested too deeply")
    except ValueError as error:
        return MalformedCall(reason=f"the call is not valid JSON: {error}")
    match call:
        case {"name": str() as name, "arguments": dict() as arguments}:
            return ParsedCall(tool=name, arguments=arguments)
    reason = 'the call is no JSON object as {"name": "...", "arguments": {...}}'
    return MalformedCall(reason=reason)


def _parse_function(text: str) -> ParsedCall | MalformedCall:
    """Parse a call in the format of Qwen3-Coder and Qwen3.5."""
    function = _FUNCTION.fullmatch(text)
    if function is None:
        return MalformedCall(
            reason="the call is malformed; expected <function=NAME>, then "
            "<parameter=NAME>VALUE</parameter> for each argument, then </function>"
        )
    # The template writes a line break before and after a value.
    arguments = {
        name: value.removeprefix("\n").removesuffix("\n")
        for name, value in _PARAMETER.findall(function[2])
    }
    return ParsedCall(tool=function[1], arguments=arguments, has_types=False)


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def strip_thoughts(text: str) -> str:
    """Remove the thoughts from a response, and mask it with `mask_call_arguments`.

    An unclosed `<think>` extends through the next `</tool_response>`, or to the end.
    """
    rest = mask_call_arguments(text).rpartition("</think>")[2]
    return _UNCLOSED_THOUGHT.sub("", rest)


_UNCLOSED_THOUGHT = re.compile(r"<think>.*?(?:</tool_response>|\Z)", re.DOTALL)


def _find_visible_span(masked: str) -> tuple[int, int]:
    """Return the start and end of the text outside thoughts in a masked turn."""
    thoughts = masked.rpartition("</think>")
    begin = len(masked) - len(thoughts[2])
    return begin, begin + len(thoughts[2].partition("<think>")[0])


def follows_qwen_format(text: str) -> bool:
    """Return True if a response follows Qwen's protocol.

    Outside closed think blocks, the tags must form any number of rounds, each with valid calls and
    as many results, followed by one answer that ends the text. Other text may appear in between.

    Args:
        text: Response, including tool results as rendered by the chat template.
    """
    text = remove_think_blocks(mask_call_arguments(text))
    tags = "".join(_LETTERS[tag] for tag in _CALL_TAGS.findall(text))
    if not (text.endswith("</answer>") and re.fullmatch(r"(?:(?:cC)+(?:rR)+)*aA", tags)):
        return False
    if any(len(calls) != len(results) for calls, results in _ROUND.findall(tags)):
        return False
    return all(isinstance(parse_call(call), ParsedCall) for call in _CALL.findall(text))


_ROUND = re.compile(r"(?<![cC])([cC]+)([rR]+)")
_CALL = re.compile(r"<tool_call>((?:(?!<tool_call>).)*?)</tool_call>", re.DOTALL)
_CALL_TAGS = re.compile(r"</?(?:think|tool_call|tool_response|answer)>")
_LETTERS = {
    **{"<tool_call>": "c", "</tool_call>": "C", "<tool_response>": "r", "</tool_response>": "R"},
    **{"<answer>": "a", "</answer>": "A", "<think>": "t", "</think>": "t"},
}


def extract_last_query(turn: str, tag: str = "search") -> str | None:
    """Return the dedented text between the last opening tag and the final closing tag.

    Returns None if the turn does not end with the closing tag or has no opening tag.
    """
    if not turn.endswith(f"</{tag}>"):
        return None
    _, opener, query = turn.removesuffix(f"</{tag}>").rpartition(f"<{tag}>")
    return textwrap.dedent(query).strip() if opener else None


def extract_last_answer(response: str) -> str:
    """Return the content of the last `<answer>`, stripped; "" if there is none.

    If there is no `</answer>`, return the partial text after the last `<answer>`.
    """
    before_close, close, _ = response.rpartition("</answer>")
    _, opener, answer = (before_close if close else response).rpartition("<answer>")
    return answer.strip() if opener else ""


def _compute_answer_reward(response: str, answers: Sequence[str], **amounts: float) -> float:
    if is_abstention(response):
        return 0.0
    answer = extract_last_answer(response)
    return max(compute_search_r1_reward(answer, truth, **amounts) for truth in answers)


def search_r1(
    tools: Sequence[str] = (),
    *,
    format_reward: float = 0.5,
    format_failure: float = -1.0,
    answer_reward: float = 1.0,
    exact_match_bonus: float = 2.0,
    not_found: float = 0.5,
) -> Protocol:
    """Build Search-R1's protocol.

    Args:
        tools: Names of tools other than the search engine.
        format_reward: Reward for a well-formed response.
        format_failure: Reward for a malformed response.
        answer_reward: Reward for an answer close to an accepted answer.
        exact_match_bonus: Reward for an exact match, instead of `answer_reward`.
        not_found: Reward for the answer `search_r1.NOT_FOUND`.
    """
    tools = ("search", *tools)
    is_well_formed = partial(follows_search_r1_format, tools=tools)

    def is_correct(response: str, answers: Sequence[str]) -> bool:
        answer = extract_last_answer(response)
        return not is_abstention(response) and any(is_close_answer(answer, t) for t in answers)

    return Protocol(
        name="search_r1",
        tags=("think", *tools, "information", "answer"),
        tools=tools,
        stop_strings=("</search>", "</answer>"),
        result_prefix="\n\n<information>",
        result_suffix="</information>\n\n",
        final_answer=extract_last_answer,
        is_well_formed=is_well_formed,
        format_reward=lambda text: format_reward if is_well_formed(text) else format_failure,
        reward_parts=("format", "answer", "exact_match", "f1"),
        correctness_name="answer",
        correctness=partial(
            _compute_answer_reward,
            reward=answer_reward,
            exact_match_bonus=exact_match_bonus,
            not_found=not_found,
        ),
        is_correct=is_correct,
    )


def bapo(tools: Sequence[str] = ()) -> Protocol:
    """Build BAPO's protocol. `<python>` is a tag even without the Python tool.

    Args:
        tools: Names of tools other than the search engine.
    """
    tools = tuple(dict.fromkeys(("search", "python", *tools)))

    def is_well_formed(response: str) -> bool:
        return (
            follows_bapo_format(response, tools=tools)
            and extract_boxed_answer(response) is not None
        )

    correctness = partial(compute_bapo_correctness, tools=tools)
    return Protocol(
        name="bapo",
        tags=("think", *tools, "result", "answer"),
        tools=tools,
        stop_strings=("</search>", "</answer>"),
        result_prefix=" <result>\n",
        result_suffix="\n</result>",
        final_answer=lambda response: extract_boxed_answer(response) or "",
        is_well_formed=is_well_formed,
        format_reward=lambda response: 0.0 if is_well_formed(response) else -1.0,
        reward_parts=("format", "exact_match", "f1", "bapo"),
        correctness_name="bapo",
        correctness=correctness,
        is_correct=lambda response, answers: correctness(response, answers) > 0,
    )


def qwen(
    tools: Sequence[str] = (), *, format_reward: float = 0.0, format_failure: float = -1.0
) -> Protocol:
    """Build Qwen's protocol, with the final answer in `<answer>`.

    Args:
        tools: Names of all tools.
        format_reward: Reward for a well-formed response.
        format_failure: Reward for a malformed response.
    """

    def extract_answer(response: str) -> str:
        return extract_last_answer(strip_thoughts(response))

    def abstains(response: str) -> bool:
        text = strip_thoughts(response)
        return "</answer>" in text and is_refusal(extract_last_answer(text))

    def compute_exact_match(response: str, answers: Sequence[str]) -> float:
        return 0.0 if abstains(response) else exact_match(extract_answer(response), answers)

    return Protocol(
        name="qwen",
        tags=("think", "tool_call", "tool_response", "tools", "answer"),
        tools=tuple(tools),
        stop_strings=(),
        result_prefix="",
        result_suffix="",
        final_answer=extract_answer,
        is_well_formed=follows_qwen_format,
        format_reward=lambda text: format_reward if follows_qwen_format(text) else format_failure,
        reward_parts=("format", "exact_match", "f1"),
        correctness_name="exact_match",
        correctness=compute_exact_match,
        is_correct=lambda response, answers: compute_exact_match(response, answers) > 0,
        read=parse_tool_calls,
        is_abstention=abstains,
        in_template=True,
    )


SEARCH_R1 = search_r1()

BAPO = bapo()

PROTOCOLS: Mapping[str, Callable[..., Protocol]] = {
    "search_r1": search_r1,
    "bapo": bapo,
    "qwen": qwen,
}
"""Functions that build a protocol from tool names, by config name. For tag protocols, the names
exclude the search engine."""
