r"""The tags a searching model writes: how they are parsed, defused and rendered.

Two grammars, as data. In both the model thinks in `<think>..</think>`, asks in
`<search>..</search>`, calls other tools by tags of their names, and closes with
`<answer>..</answer>`. Search-R1 (https://arxiv.org/abs/2503.09516) shows results in
`<information>`; BAPO (https://arxiv.org/abs/2601.11037) in `<result>`, and has the final answer in
a `\boxed{..}`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from jaxrl.envs import rewards
from jaxrl.envs.base import Observation
from jaxrl.envs.rewards import (
    answer_reward,
    bapo_correctness,
    bapo_format,
    boxed_answer,
    is_abstention,
    is_right_answer,
    search_r1_format,
)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """One grammar, and what its keepers are paid.

    Attributes:
        name: as in `PROTOCOLS`.
        tags: all of its tags; text from outside cannot write them.
        tools: those of them that call a tool.
        stop_strings: a turn of a model without further tools ends where one of these ends.
        result_prefix: opens the block with a tool's result.
        result_suffix: closes it.
        final_answer: the answer of a response, "" where there is none.
        is_well_formed: whether a response keeps to the protocol.
        format_reward: what a response earns by whether it does.
        reward_parts: what is measured of every response.
        correctness_name: the one of these that is this protocol's own.
        correctness: that part, of a response and the accepted answers.
        is_correct: whether a response is correct by that part; an abstention never is.
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

    def sanitize(self, text: str) -> str:
        """Foreign text with the angle brackets of every protocol tag replaced by ‹ and ›.

        Opening, closing and self-closing tags count, in any case and with blanks inside the
        brackets. Lone surrogates, which JSON can carry and UTF-8 cannot, become "?".
        """
        names = "|".join(self.tags)
        tag = re.compile(rf"<(\s*(?:/\s*)?(?:{names})\s*(?:/\s*)?)>", re.IGNORECASE)
        return tag.sub(r"‹\1›", text).encode("utf-8", "replace").decode("utf-8")

    def render_observation(self, body: str) -> Observation:
        """The block that answers a call. Nothing else writes a result's tags."""
        return Observation(
            prefix=self.result_prefix, body=self.sanitize(body), suffix=self.result_suffix
        )


def last_query(turn: str, tag: str = "search") -> str | None:
    """What a turn that ends with the closing tag asks for, dedented and stripped; may be blank.

    The query is the text after the last opening tag. None when the turn ends otherwise or opens
    nothing.
    """
    if not turn.endswith(f"</{tag}>"):
        return None
    _, opener, query = turn.removesuffix(f"</{tag}>").rpartition(f"<{tag}>")
    return textwrap.dedent(query).strip() if opener else None


def last_answer(response: str) -> str:
    """The last answer of a response, stripped: Search-R1's final answer.

    Without any `</answer>`, as when the budget ran out, it is the partial text after the last
    `<answer>`; without an opener it is "".
    """
    before_close, close, _ = response.rpartition("</answer>")
    _, opener, answer = (before_close if close else response).rpartition("<answer>")
    return answer.strip() if opener else ""


def _best_answer_reward(response: str, answers: Sequence[str], **amounts: float) -> float:
    if is_abstention(response):
        return 0.0
    answer = last_answer(response)
    return max(answer_reward(answer, truth, **amounts) for truth in answers)


def _has_right_answer(response: str, answers: Sequence[str]) -> bool:
    answer = last_answer(response)
    return not is_abstention(response) and any(is_right_answer(answer, t) for t in answers)


def search_r1(
    tools: Sequence[str] = (),
    *,
    format_reward: float = 0.5,
    format_failure: float = -1.0,
    answer_reward: float = 1.0,
    exact_match_bonus: float = 2.0,
    not_found: float = 0.5,
) -> Protocol:
    """Search-R1's protocol with the amounts that its parts `format` and `answer` pay.

    Args:
        tools: names of tools beside the search engine.
        format_reward: for a response that keeps to the protocol.
        format_failure: for one that does not.
        answer_reward: for an answer close to the truth.
        exact_match_bonus: for the truth itself, in place of that.
        not_found: for the answer "no relevant content found".
    """
    tools = ("search", *tools)
    return Protocol(
        name="search_r1",
        tags=("think", *tools, "information", "answer"),
        tools=tools,
        stop_strings=("</search>", "</answer>"),
        result_prefix="\n\n<information>",
        result_suffix="</information>\n\n",
        final_answer=last_answer,
        is_well_formed=partial(search_r1_format, tools=tools),
        format_reward=partial(
            rewards.format_reward, tools=tools, reward=format_reward, failure=format_failure
        ),
        reward_parts=("format", "answer", "exact_match", "f1"),
        correctness_name="answer",
        correctness=partial(
            _best_answer_reward,
            reward=answer_reward,
            exact_match_bonus=exact_match_bonus,
            not_found=not_found,
        ),
        is_correct=_has_right_answer,
    )


def _boxed_or_blank(response: str) -> str:
    return boxed_answer(response) or ""


def bapo(tools: Sequence[str] = ()) -> Protocol:
    """BAPO's protocol; its `<python>` is a tag also where no tool answers it.

    Args:
        tools: names of tools beside the search engine.
    """
    tools = tuple(dict.fromkeys(("search", "python", *tools)))

    def is_well_formed(response: str) -> bool:
        # As its correctness has it: a box that cannot be read is bad format too.
        return bapo_format(response, tools=tools) and boxed_answer(response) is not None

    correctness = partial(bapo_correctness, tools=tools)
    return Protocol(
        name="bapo",
        tags=("think", *tools, "result", "answer"),
        tools=tools,
        stop_strings=("</search>", "</answer>"),
        result_prefix=" <result>\n",
        result_suffix="\n</result>",
        final_answer=_boxed_or_blank,
        is_well_formed=is_well_formed,
        format_reward=lambda response: 0.0 if is_well_formed(response) else -1.0,
        reward_parts=("format", "exact_match", "f1", "bapo"),
        correctness_name="bapo",
        correctness=correctness,
        is_correct=lambda response, answers: correctness(response, answers) > 0,
    )


SEARCH_R1 = search_r1()

BAPO = bapo()

PROTOCOLS: Mapping[str, Callable[..., Protocol]] = {"search_r1": search_r1, "bapo": bapo}
"""Grammars, as functions of the names of the tools beside the search engine."""
