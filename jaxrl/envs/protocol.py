r"""The tags a searching model writes: how they are parsed, defused and rendered.

Two grammars, as data. In both the model thinks in `<think>..</think>`, asks in
`<search>..</search>` and closes with `<answer>..</answer>`. Search-R1
(https://arxiv.org/abs/2503.09516) shows results in `<information>`; BAPO
(https://arxiv.org/abs/2601.11037) in `<result>`, also those of `<python>..</python>`, and has the
final answer in a `\boxed{..}`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxrl.envs.base import Observation
from jaxrl.envs.rewards import (
    answer_reward,
    bapo_correctness,
    bapo_format,
    boxed_answer,
    format_reward,
    is_abstention,
)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """One grammar, and what its keepers are paid.

    Attributes:
        name: as in `PROTOCOLS`.
        tags: all of its tags; text from outside cannot write them.
        stop_strings: a turn of a model without a Python tool ends where one of these ends.
        result_prefix: opens the block with a tool's result.
        result_suffix: closes it.
        final_answer: the answer of a response, "" where there is none.
        format_reward: what a response's format earns; below 0 it is malformed.
        correctness_name: the reward part that is this protocol's own.
        correctness: that part, of a response and the accepted answers; not above 0 for an
            abstention.
    """

    name: str
    tags: tuple[str, ...]
    stop_strings: tuple[str, ...]
    result_prefix: str
    result_suffix: str
    final_answer: Callable[[str], str]
    format_reward: Callable[[str], float]
    correctness_name: str
    correctness: Callable[[str, Sequence[str]], float]

    @property
    def reward_parts(self) -> tuple[str, ...]:
        """Names of what is measured of every response."""
        return ("format", self.correctness_name, "exact_match", "f1")

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


def _best_answer_reward(response: str, answers: Sequence[str]) -> float:
    if is_abstention(response):
        return 0.0
    answer = last_answer(response)
    return max(answer_reward(answer, truth) for truth in answers)


def _boxed_or_blank(response: str) -> str:
    return boxed_answer(response) or ""


def _bapo_format_reward(response: str) -> float:
    # As its correctness has it: a box that cannot be read is bad format too.
    return 0.0 if bapo_format(response) and boxed_answer(response) is not None else -1.0


SEARCH_R1 = Protocol(
    name="search_r1",
    tags=("think", "search", "information", "answer"),
    stop_strings=("</search>", "</answer>"),
    result_prefix="\n\n<information>",
    result_suffix="</information>\n\n",
    final_answer=last_answer,
    format_reward=format_reward,
    correctness_name="answer",
    correctness=_best_answer_reward,
)

BAPO = Protocol(
    name="bapo",
    tags=("think", "search", "python", "result", "answer"),
    stop_strings=("</search>", "</answer>"),
    result_prefix=" <result>\n",
    result_suffix="\n</result>",
    final_answer=_boxed_or_blank,
    format_reward=_bapo_format_reward,
    correctness_name="bapo",
    correctness=bapo_correctness,
)

PROTOCOLS: Mapping[str, Protocol] = {p.name: p for p in (SEARCH_R1, BAPO)}
