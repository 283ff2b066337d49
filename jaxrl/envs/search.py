"""The search environment: the model asks, reads what a search engine found, and answers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from jaxrl.envs.base import (
    Env,
    Episode,
    Message,
    Outcome,
    Prompt,
    Reward,
    StepResult,
    Task,
    ToolError,
)
from jaxrl.envs.calls import side_by_side
from jaxrl.envs.protocol import SEARCH_R1, Protocol, last_query
from jaxrl.envs.python_tool import NO_OUTPUT, PythonTool
from jaxrl.envs.retrieval import (
    MAX_WORKERS,
    NO_INFORMATION,
    SearchEngine,
    SearchError,
    as_search_error,
    search_one,
    text_or_error,
)
from jaxrl.envs.rewards import check_weights, exact_match, f1, is_abstention, weighted_total


class SearchEnv(Env):
    """Questions answered with a search engine, in Search-R1's or BAPO's protocol.

    A turn ends with `</answer>`, which ends the episode, or with `</search>`, which inserts what
    the engine found. A turn that the model ends by itself is malformed. One that closes a search
    it never opened earns nothing, and the model goes on. An answer that says "I don't know" ends
    the episode as abstained. With a Python tool, `</python>` ends a turn as `</search>` does.
    """

    stop_strings = SEARCH_R1.stop_strings

    def __init__(
        self,
        engine: SearchEngine,
        *,
        system: str,
        template: str,
        examples: Sequence[Message] = (),
        max_searches: int,
        reward_weights: Mapping[str, float],
        protocol: Protocol = SEARCH_R1,
        correct_by: str = "exact_match",
        python: PythonTool | None = None,
    ) -> None:
        """Checks the settings.

        Args:
            engine: answers the queries.
            system: the system message; "" for none.
            template: the user message, with `{question}` where the question goes. Other braces
                are plain text.
            examples: messages between the two.
            max_searches: turns allowed that call a tool, blank calls included. One more
                generation follows them; if that calls again, the episode is out of budget.
            reward_weights: weight of each of the protocol's `reward_parts` in the total; 0 where
                absent.
            protocol: the tags, and how format and answers are judged.
            correct_by: the part by which an episode is correct: where it is above 0, or for the
                protocol's own part where `protocol.is_correct` says so.
            python: runs what the model writes in `<python>`; only for a protocol with that tag.
        """
        if max_searches < 0:
            raise ValueError(f"max_searches is {max_searches}; expected 0 or more.")
        check_weights(reward_weights, protocol.reward_parts)
        measures = [part for part in protocol.reward_parts if part != "format"]
        if correct_by not in measures:
            raise ValueError(
                f"correct_by is {correct_by!r}; expected one of {', '.join(measures)} in the "
                f"protocol {protocol.name!r}."
            )
        if python is not None and "python" not in protocol.tags:
            raise ValueError(f"the protocol {protocol.name!r} has no tag for a Python tool.")
        tools = () if python is None else ("</python>",)
        self.stop_strings = (*protocol.stop_strings, *tools)
        self._engine = engine
        self._python = python
        self._prompt = Prompt(system=system, template=template, examples=tuple(examples))
        self._max_searches = max_searches
        self._reward_weights = dict(reward_weights)
        self._protocol = protocol
        self._correct_by = correct_by

    def start(self, tasks: Sequence[Task]) -> list[list[Message]]:
        """System message, examples and question; a task that brings messages keeps just those."""
        return [self._prompt.messages(task) for task in tasks]

    def step(self, episodes: Sequence[Episode], texts: Sequence[str]) -> list[StepResult]:
        """Replies to one turn of each episode; all queries go to the engine in one call."""
        results = [self._read_turn(e, text) for e, text in zip(episodes, texts, strict=True)]
        waiting = {i: r.tool_call for i, r in enumerate(results) if r.tool_call is not None}
        for tool, ask in (("search", self._ask), ("python", self._compute)):
            calls = {i: c for i, c in waiting.items() if texts[i].endswith(f"</{tool}>")}
            name = None if tool == "search" else tool
            for i, found in zip(calls, self._call(ask, list(calls.values())), strict=True):
                results[i] = dataclasses.replace(found, tool=name)
        return results

    def _read_turn(self, episode: Episode, text: str) -> StepResult:
        """The reply to one turn, as far as it is known before calling a tool.

        A result with a `tool_call` still waits for the tool.
        """
        if text.endswith("</answer>"):
            abstains = is_abstention(episode.response + text)
            return StepResult(outcome=Outcome.ABSTAINED if abstains else Outcome.ANSWERED)
        if not text.endswith(self.stop_strings):
            return StepResult(outcome=Outcome.MALFORMED)
        is_search = text.endswith("</search>")
        call = last_query(text, "search" if is_search else "python")
        if call is None:
            return StepResult()
        if _num_calls(episode) >= self._max_searches:
            return StepResult(outcome=Outcome.OUT_OF_BUDGET)
        if not call:
            blank = NO_INFORMATION if is_search else NO_OUTPUT
            return StepResult(observation=self._protocol.render_observation(blank))
        return StepResult(tool_call=call)

    def _call(
        self, ask: Callable[[list[str]], Sequence[str | ToolError]], calls: list[str]
    ) -> list[StepResult]:
        if not calls:
            return []
        start = time.perf_counter()
        found = ask(calls)
        latency_s = time.perf_counter() - start
        return [self._found(c, f, latency_s) for c, f in zip(calls, found, strict=True)]

    def _compute(self, codes: list[str]) -> Sequence[str | ToolError]:
        return self._python.batch_run(codes) if self._python else []

    def _ask(self, queries: list[str]) -> Sequence[str | ToolError]:
        """What the engine says to each query, or how it failed for that query.

        Those that failed are asked once more, each alone; side by side, or a dead server would
        cost one timeout a row.
        """
        found = self._ask_together(queries)
        failed = [i for i, reply in enumerate(found) if isinstance(reply, SearchError)]
        replies = side_by_side(
            lambda i: search_one(self._engine, queries[i]), failed, max_threads=MAX_WORKERS
        )
        for i, reply in zip(failed, replies, strict=True):
            found[i] = reply
        return found

    def _ask_together(self, queries: list[str]) -> list[str | SearchError]:
        try:
            found = list(map(text_or_error, self._engine.batch_search(queries)))
            if len(found) != len(queries):
                raise SearchError(f"{len(queries)} queries got {len(found)} results.")
            return found
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # as in `search_one`; of which query it does not say
            return [as_search_error(error)] * len(queries)

    def _found(self, call: str, found: str | ToolError, latency_s: float) -> StepResult:
        if isinstance(found, ToolError):
            return StepResult(
                outcome=Outcome.ENVIRONMENT_ERROR,
                tool_call=call,
                latency_s=latency_s,
                error=str(found) or type(found).__name__,
            )
        observation = self._protocol.render_observation(found)
        return StepResult(observation=observation, tool_call=call, latency_s=latency_s)

    def score(self, group: Sequence[Episode]) -> list[Reward]:
        """Format of the whole response and correctness of its final answer.

        An abstention is never correct, whatever else its answer says.
        """
        return [self._score_one(episode) for episode in group]

    def _score_one(self, episode: Episode) -> Reward:
        task, response, protocol = episode.task, episode.response, self._protocol
        if not task.answers:
            raise ValueError(f"task {task.id!r} has no accepted answer; set its `answers`.")
        answer, abstains = protocol.final_answer(response), is_abstention(response)
        judged = "" if abstains else answer
        parts = {
            "format": protocol.format_reward(response),
            protocol.correctness_name: protocol.correctness(response, task.answers),
            "exact_match": exact_match(judged, task.answers),
            "f1": f1(judged, task.answers),
        }
        return Reward(
            total=weighted_total(self._reward_weights, parts),
            parts=parts,
            final_answer=answer,
            is_correct=self._is_correct(response, task, parts),
            is_abstention=abstains,
            is_well_formed=protocol.is_well_formed(response),
        )

    def _is_correct(self, response: str, task: Task, parts: Mapping[str, float]) -> bool:
        # What a protocol's own part pays is a setting, and may be above 0 for what is not right.
        if self._correct_by == self._protocol.correctness_name:
            return self._protocol.is_correct(response, task.answers)
        return parts[self._correct_by] > 0


def _num_calls(episode: Episode) -> int:
    """Turns so far that called a tool; blank calls reach none, but are answered like the others."""
    return sum(turn.observation is not None for turn in episode.turns)
