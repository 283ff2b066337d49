"""LLM judges that score responses with models behind an OpenAI-compatible endpoint.

A judge is a reward part. `ResilientSearch` wraps it like a search engine: replies are cached in
memory and recorded in the workdir, calls have a deadline and are retried, and calls pause during an
outage. A reply without a number is an environment error, never a score.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import regex

from jaxrl.config.keys import REPLAY, Key, reject_value
from jaxrl.envs.base import CallRecord, ScoredEpisode, Task, ToolError
from jaxrl.envs.rewards.combiner import RewardPartCall, RewardPartResult
from jaxrl.envs.search.resilient import ResilientSearch
from jaxrl.envs.tools.base import CallResult
from jaxrl.extras.endpoints.completions import EndpointTool, get_first_choice, wrap_endpoint
from jaxrl.utils.http_client import check_url
from jaxrl.utils.text import replace_surrogates

_PLACEHOLDER = re.compile(r"\{(question|response|answers)\}")
SCORE_PATTERN = (
    r"(?im)score\W{0,3}(?:\([^)\n]{0,100}\)\W{0,3})?[:=]\W{0,5}?"
    r"(-?\d+(?:\.\d+)?)(?:\s*/\s*\d+)?\W*$"
)
"""Number after `score:` at a line's end, such as `**Score (0-10): 7/10**` or `{"score": 7}`."""

_MAX_QUOTED = 200  # characters of a reply to quote in an error message
_MAX_CHARS = 4096  # trailing characters of a reply in which the pattern is searched
_TIMEOUT_S = 1.0  # timeout of the search: backtracking in a user's pattern may take hours


def _declare_field(description: str, default: Any = None, **bounds: Any) -> Any:
    """Declare a dataclass field that `Key` validates with `bounds`.

    A field without a default is a required string.
    """
    metadata = {"key": Key("" if default is None else default, description, **bounds)}
    if default is None:
        return field(metadata=metadata)
    return field(default_factory=lambda: default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """Settings of a judge, from an entry of `config.reward.judges`."""

    url: str = _declare_field(
        "Base URL before `/chat/completions`, such as `http://localhost:8000/v1`."
    )
    model: str = _declare_field("Name of the model at the endpoint.")
    prompt: str = _declare_field(
        "User message with the placeholders `{question}`, `{response}` and `{answers}`. Other "
        "braces are plain text."
    )
    system: str = _declare_field("System message; empty for none.", "")
    pattern: str = _declare_field(
        "Regular expression with one group, around the number. The last match in the reply's last "
        "4,096 characters counts. The search may take a second.",
        SCORE_PATTERN,
    )
    low: float = _declare_field("Number that means a score of 0. Lower numbers are errors.", 0.0)
    high: float = _declare_field("Number that means a score of 1. Higher numbers are errors.", 10.0)
    key_env: str = _declare_field("Environment variable with the API key; empty for none.", "")
    temperature: float = _declare_field("Sampling temperature.", 0.0, at_least=0)
    max_tokens: int = _declare_field("Maximum tokens of a reply.", 1024, above=0)
    options: Mapping[str, Any] = _declare_field(
        "Additional request fields, such as `{'reasoning_effort': 'low'}`.",
        {},
        is_nested=True,
        example="low",
    )
    deadline_s: float = _declare_field("Seconds per call.", 60.0, above=0)
    retries: int = _declare_field(
        "Retries of a call that fails or returns no number.", 3, at_least=0
    )
    backoff_s: float = _declare_field(
        "Seconds before the first retry, then doubled.", 1.0, at_least=0
    )
    concurrency: int = _declare_field("Maximum calls in flight, up to 32.", 16, above=0)
    queries_per_second: float = _declare_field("Calls per second; 0 for no limit.", 0.0, at_least=0)
    cache_mib: float = _declare_field(
        "MiB of replies cached in memory; 0 for none.", 64.0, at_least=0
    )
    outage_deadline_s: float = _declare_field(
        "Seconds without any response after which calls fail.", 120.0, above=0
    )
    replay: str = _declare_field(
        "record: keep replies on disk and reuse them. only: use recorded replies without the "
        "endpoint. off: neither.",
        "record",
        one_of=REPLAY,
    )
    replay_folder: str = _declare_field(
        "Folder of the replies; empty: judgements/ in the workdir.", ""
    )

    def __post_init__(self) -> None:
        """Validate all settings.

        Raises:
            ValueError: A setting is out of bounds or malformed.
        """
        for setting in fields(self):
            setting.metadata["key"].check(
                f"reward.judges.{setting.name}", getattr(self, setting.name)
            )
        check_url("reward.judges", self.url)
        if "{response}" not in self.prompt:
            reject_value("reward.judges.prompt", self.prompt, "{response} in it")
        try:
            num_groups = regex.compile(self.pattern).groups
        except regex.error as error:
            reject_value("reward.judges.pattern", self.pattern, f"a regular expression ({error})")
        if num_groups != 1:
            reject_value("reward.judges.pattern", self.pattern, "one group, around the number")
        if not self.low < self.high:
            reject_value("reward.judges.low", self.low, f"less than high={self.high}")

    @property
    def max_concurrent(self) -> int:
        """Alias of `concurrency` for `EndpointTool`."""
        return self.concurrency

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that affect a reply, except for the prompt and the URL."""
        names = ("model", "system", "temperature", "max_tokens", "pattern", "low", "high")
        return {**{name: getattr(self, name) for name in names}, "options": dict(self.options)}


class JudgeEndpoint(EndpointTool):
    """Endpoint that returns a judge's reply as text."""

    name = "judge"

    def run(self, call: str, /) -> str:
        """Request the reply to a prompt.

        Raises:
            ToolError: The request failed, or the reply has no valid number.
        """
        settings = self.settings
        system = [{"role": "system", "content": settings.system}] if settings.system else []
        body = {
            "model": settings.model,
            "messages": [*system, {"role": "user", "content": replace_surrogates(call)}],
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            **settings.options,
        }
        choice, message = get_first_choice(self.send_request(body))
        reply = message.get("content")
        if not isinstance(reply, str):
            raise ToolError(f"the reply's content is {reply!r:.{_MAX_QUOTED}}; expected text")
        if choice.get("finish_reason") == "length":  # `Score: 1` may be the start of `Score: 10`
            raise ToolError(
                f"the reply ends {reply[-_MAX_QUOTED:]!r}, cut at "
                f"max_tokens={settings.max_tokens}; raise that setting of the judge"
            )
        parse_score(reply, settings)
        return reply


def parse_score(reply: str, settings: JudgeSettings) -> float:
    """Parse the score in a reply and rescale it to [0, 1].

    Raises:
        ToolError: The reply has no number from `low` to `high`.
        TimeoutError: Matching the pattern took more than a second.
    """
    matches = regex.findall(
        settings.pattern, reply[-_MAX_CHARS:], timeout=_TIMEOUT_S, concurrent=True
    )
    try:
        number = float(matches[-1]) if matches else math.nan
    except ValueError:
        number = math.nan
    if not settings.low <= number <= settings.high:
        raise ToolError(
            f"the reply ends {reply[-_MAX_QUOTED:]!r}; expected a number from {settings.low:g} to "
            f"{settings.high:g} where {settings.pattern!r} finds it"
        )
    return (number - settings.low) / (settings.high - settings.low)


class Judge:
    """Reward part that scores responses with an LLM judge, from 0 to 1."""

    is_async = False

    def __init__(self, name: str, settings: JudgeSettings) -> None:
        """Store the settings. `open` reads the API key."""
        self.name, self.settings = name, settings
        self._resilient: ResilientSearch | None = None

    def open(
        self,
        workdir: Path | None,
        *,
        process: int = 0,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Open the endpoint and the recording; see `wrap_endpoint` for arguments and errors."""
        self._resilient = wrap_endpoint(
            _ResilientJudge,
            JudgeEndpoint,
            self.settings,
            key=f"reward.judges[{self.name!r}]",
            identity=self.settings.identity,
            folder="judgements",
            workdir=workdir,
            process=process,
            log=lambda text: log(f"{text} (reward part {self.name!r})"),
        )

    def requests(self, group: Sequence[ScoredEpisode]) -> list[RewardPartCall]:
        """Return one judge call per episode."""
        judge_calls = [
            _JudgeCall(judge=self, prompt=self.build_prompt(episode)) for episode in group
        ]
        return [
            RewardPartCall(
                members=(index,),
                invoke=judge_call.invoke,
                parse=lambda score: [RewardPartResult(score=score)],
                records=judge_call.list_records,
            )
            for index, judge_call in enumerate(judge_calls)
        ]

    def missing_fields(self, task: Task) -> list[str]:
        """Return `["answers"]` if the prompt contains answers but the task has none, else []."""
        return ["answers"] if "{answers}" in self.settings.prompt and not task.answers else []

    def build_prompt(self, sample: ScoredEpisode) -> str:
        """Fill in the judge's prompt for an episode."""
        task = sample.episode.task
        questions = [
            message["content"] for message in task.messages or () if message["role"] == "user"
        ]
        texts = {
            "question": task.question if task.question is not None else (questions or [""])[-1],
            "response": sample.episode.response,
            "answers": " | ".join(task.answers),
        }
        return _PLACEHOLDER.sub(lambda match: texts[match[1]], self.settings.prompt)

    def send_request(self, prompt: str) -> CallResult:
        """Request the reply to a prompt; return the reply or the error, and the call's record."""
        assert self._resilient is not None, "open comes first"
        [result] = self._resilient.call_batch([prompt])
        return replace(result, record=replace(result.record, tool=self.name))


@dataclass(eq=False, kw_only=True)
class _JudgeCall:
    """Judge call for one episode."""

    judge: Judge
    prompt: str
    started_at: float | None = None  # time.monotonic()
    result: CallResult | None = None

    def invoke(self) -> float:
        """Call the judge; return a score from 0 to 1.

        Raises:
            ToolError: The call failed, or the reply has no valid score.
        """
        self.started_at = time.monotonic()
        self.result = self.judge.send_request(self.prompt)
        if isinstance(self.result.result, ToolError):
            raise ToolError(
                f"the judge {self.judge.name!r} returned no score: {self.result.result}"
            )
        return parse_score(self.result.result, self.judge.settings)

    def list_records(self) -> list[CallRecord]:
        """Return the call's record in a list; a call abandoned after sending is one attempt."""
        if self.result is not None:
            return [self.result.record]
        return [
            CallRecord(
                call=self.prompt,
                tool=self.judge.name,
                attempts=int(self.started_at is not None),
                waited_s=time.monotonic() - self.started_at if self.started_at is not None else 0.0,
                error="abandoned",
            )
        ]


class _ResilientJudge(ResilientSearch):
    """Judge endpoint wrapped with caching, retries and a recording."""

    label, section = "the judge", "config.reward.judges[..]"
