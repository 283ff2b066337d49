import dataclasses
from collections.abc import Sequence

from jaxrl.envs.protocol import Protocol, search_r1
from jaxrl.envs.rewards.qa import exact_match


def last_line(response: str) -> str:
    """Return the last line of the answer, "" if there is none."""
    answer = response.rpartition("<answer>")[2] if response.endswith("</answer>") else ""
    return answer.removesuffix("</answer>").strip().rpartition("\n")[2]


def is_right(response: str, answers: Sequence[str]) -> float:
    return exact_match(last_line(response), answers)


def facts(tools: Sequence[str] = ()) -> Protocol:
    """Search-R1's protocol with results in <facts>; the answer may begin with reasons."""
    base = search_r1(tools)
    return dataclasses.replace(
        base,
        name="facts",
        tags=("think", *base.tools, "facts", "answer"),
        result_prefix="\n<facts>",
        result_suffix="</facts>\n",
        final_answer=last_line,
        is_well_formed=lambda response: last_line(response) != "",
        format_reward=lambda response: 0.0 if last_line(response) else -1.0,
        reward_parts=("format", "last_line", "exact_match", "f1"),
        correctness_name="last_line",
        correctness=is_right,
        is_correct=lambda response, answers: is_right(response, answers) > 0,
    )
