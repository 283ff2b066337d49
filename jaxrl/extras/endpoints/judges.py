"""Judges: language models that grade responses, behind an OpenAI-compatible endpoint.

A judge is a reward part like others. What stands around a search engine stands around it too: what
was judged once is kept in memory and beside the run, calls have a deadline, are made again after a
while, and rest while nobody is answered (`resilient`). A judge that gives no number is an error of
the environment, never a score.
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

from jaxrl.envs.base import CallRecord, Finished, Task, ToolError
from jaxrl.envs.rewards.combiner import Call, Measured
from jaxrl.envs.search.recording import Recording
from jaxrl.envs.search.resilient import Nobody, ResilientSearch
from jaxrl.envs.tools.base import Answer, Tool
from jaxrl.extras.endpoints.completions import Completions, content_of, first_choice, policy_of
from jaxrl.utils.concurrency import MAX_S
from jaxrl.utils.http_client import check_url, plain_text

PLACES = ("question", "response", "answers")
_PLACE = re.compile(rf"\{{({'|'.join(PLACES)})\}}")
SCORE = (
    r"(?im)score\W{0,3}(?:\([^)\n]{0,100}\)\W{0,3})?[:=]\W{0,5}?"
    r"(-?\d+(?:\.\d+)?)(?:\s*/\s*\d+)?\W*$"
)
"""A number that ends a line after `score:`, as in `**Score (0-10): 7/10**` or `{"score": 7}`."""

_MAX_SHOWN = 200  # characters of a reply that an error shows
_MAX_READ = 4096  # characters at a reply's end that a user's own pattern reads
_SEARCH_S = 1.0  # which a search may otherwise exceed by hours


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """Settings of a judge: the keys of an entry of `config.reward.judges`.

    Attributes:
        url: of the endpoint, up to `/chat/completions`, as `http://localhost:8000/v1`.
        model: name of the model there.
        prompt: the user's message, with `{question}`, `{response}` and `{answers}` where these go;
            other braces are plain text.
        system: the system message; "" for none.
        pattern: regular expression with one group, which holds the number. The last match in the
            reply counts; of a pattern of your own, in the reply's last 4,096 characters. It gets a
            second of computing time, in a process of its own.
        low: the number that is worth 0; a lower one cannot be read.
        high: the number that is worth 1; a higher one cannot be read.
        key_env: environment variable with the key; "" for none.
        temperature: of the judge.
        max_tokens: of its reply.
        options: further fields of the request, as {"reasoning_effort": "low"}.
        deadline_s: seconds until a call has failed.
        retries: further tries of a call that fails, or whose reply cannot be read.
        backoff_s: seconds before the first of them, doubled from try to try.
        concurrency: calls under way at most, up to 32.
        queries_per_second: calls sent at most; 0: no limit.
        cache_mib: MiB of replies kept in memory; 0: none.
        outage_deadline_s: seconds in which nobody has got an answer, after which calls fail.
        replay: record: replies are kept on disk, and what is there is not asked again; only: these
            alone answer, without the endpoint; off: neither.
        replay_folder: of the replies; "": judgements/ in the workdir.
    """

    url: str
    model: str
    prompt: str
    system: str = ""
    pattern: str = SCORE
    low: float = 0.0
    high: float = 10.0
    key_env: str = ""
    temperature: float = 0.0
    max_tokens: int = 1024
    options: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float = 60.0
    retries: int = 3
    backoff_s: float = 1.0
    concurrency: int = 16
    queries_per_second: float = 0.0
    cache_mib: float = 64.0
    outage_deadline_s: float = 120.0
    replay: str = "record"
    replay_folder: str = ""

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            ValueError: names the one that is wrong.
        """
        for one in fields(self):
            value, is_whole = getattr(self, one.name), one.type == "int"
            if one.type not in ("int", "float"):
                continue
            kinds = int if is_whole else int | float
            if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
                wanted = "a whole number" if is_whole else "a finite number"
                raise ValueError(f"a judge's {one.name} is {value!r}; expected {wanted}.")
            if one.name.endswith("_s") and value > MAX_S:
                raise ValueError(
                    f"a judge's {one.name} is {value!r}; expected at most {MAX_S:g} seconds."
                )
        check_url("reward.judges", self.url)
        if "{response}" not in self.prompt:
            raise ValueError(
                f"a judge's prompt is {self.prompt!r:.100}; expected {{response}} in it."
            )
        try:
            num_groups = regex.compile(self.pattern).groups
        except regex.error as error:
            raise ValueError(f"a judge's pattern is {self.pattern!r}: {error}.") from error
        if num_groups != 1:
            raise ValueError(
                f"a judge's pattern is {self.pattern!r}, with {num_groups} groups; expected one, "
                "around the number."
            )
        if not self.low < self.high:
            raise ValueError(f"a judge's low is {self.low}; expected less than high={self.high}.")
        if self.replay not in ("record", "only", "off"):
            raise ValueError(
                f"a judge's replay is {self.replay!r}; expected 'record', 'only' or 'off'."
            )
        for name in ("deadline_s", "concurrency", "max_tokens", "outage_deadline_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"a judge's {name} is {getattr(self, name)}; expected above 0.")
        for name in ("temperature", "retries", "backoff_s", "queries_per_second", "cache_mib"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"a judge's {name} is {getattr(self, name)}; expected 0 or more.")

    @property
    def asked(self) -> dict[str, Any]:
        """Settings on which a reply depends, beside the prompt; not where the endpoint is."""
        names = ("model", "system", "temperature", "max_tokens", "pattern", "low", "high")
        return {**{name: getattr(self, name) for name in names}, "options": dict(self.options)}


class Endpoint(Tool):
    """Asks a model for one reply to a prompt."""

    name = "judge"
    blank = ""

    def __init__(self, settings: JudgeSettings) -> None:
        """Opens no connection yet.

        Raises:
            ValueError: the key's environment variable is not set.
        """
        self._settings = settings
        self._completions = Completions(
            settings.url,
            section="reward.judges",
            key_env=settings.key_env,
            timeout_s=settings.deadline_s,
            connections=settings.concurrency,
        )

    def run(self, call: str, /) -> str:
        """The reply to a prompt, which holds a number that can be read.

        Raises:
            ToolError: there is none.
        """
        settings = self._settings
        system = [{"role": "system", "content": settings.system}] if settings.system else []
        body = {
            "model": settings.model,
            "messages": [*system, {"role": "user", "content": plain_text(call)}],
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            **settings.options,
        }
        answer = self._completions.ask(body)
        reply, (choice, _) = content_of(answer), first_choice(answer)
        if choice.get("finish_reason") == "length":  # of `Score: 10` it may have left `Score: 1`
            raise ToolError(
                f"the reply ends {reply[-_MAX_SHOWN:]!r}, cut at max_tokens={settings.max_tokens}; "
                "raise that setting of the judge"
            )
        read_number(reply, settings)
        return reply


def read_number(reply: str, settings: JudgeSettings) -> float:
    """The score in a reply, from 0 to 1.

    Raises:
        ToolError: it holds no number, or one out of bounds, or the pattern took too long.
    """
    pattern = settings.pattern
    if pattern == SCORE:  # whose time is in proportion to the text
        text = (re.findall(pattern, reply) or [""])[-1]
    else:
        try:
            matches = regex.findall(pattern, reply[-_MAX_READ:], timeout=_SEARCH_S, concurrent=True)
        except TimeoutError:
            raise ToolError(
                f"the judge's pattern {pattern!r:.100} took more than {_SEARCH_S:g} s on the last "
                f"{_MAX_READ:,} characters of a reply; repeat nothing in it that is repeated inside"
            ) from None
        text = (matches or [""])[-1]
    try:
        number = float(str(text))
    except ValueError:
        number = math.nan
    if not settings.low <= number <= settings.high:
        raise ToolError(
            f"the reply ends {reply[-_MAX_SHOWN:]!r}; expected a number from {settings.low:g} to "
            f"{settings.high:g} where {settings.pattern!r} finds it"
        )
    return (number - settings.low) / (settings.high - settings.low)


class Judge:
    """Reward part of a judge: its score of a response, from 0 to 1."""

    is_async = False

    def __init__(self, name: str, settings: JudgeSettings) -> None:
        """Asks nothing and needs no key yet; see `open`.

        Args:
            name: of the part.
            settings: checked.
        """
        self.name, self.settings = name, settings
        self._asked: _Asked | None = None

    def open(
        self,
        workdir: Path | None,
        *,
        process: int = 0,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Opens the endpoint and the recording.

        Args:
            workdir: of the run, for what is kept beside it; None where there is none.
            process: number of this process of the run.
            log: told of outages.

        Raises:
            ValueError: the key's environment variable is not set.
            FileNotFoundError: the replies alone are to answer, and there are none.
        """
        settings = self.settings
        policy = policy_of(
            settings,
            max_concurrent=settings.concurrency,
            cache_mib=settings.cache_mib,
            queries_per_second=settings.queries_per_second,
        )
        is_replay = settings.replay == "only"

        def tell(text: str) -> None:
            # A warning is told as one by how it begins.
            mark = "warning: " if text.startswith("warning: ") else ""
            log(f"{mark}reward part {self.name!r}: {text.removeprefix(mark)}")

        engine = Nobody() if is_replay else Endpoint(settings)
        recording, folder = None, settings.replay_folder or (workdir and workdir / "judgements")
        if settings.replay != "off" and (folder or is_replay):
            place = Path(folder or "judgements")
            recording = Recording(place, settings.asked, process=process, log=tell)
            if is_replay and not len(recording):
                raise FileNotFoundError(
                    f"config.reward.judges[{self.name!r}] has replay='only', but "
                    f"{recording.folder} has no replies of a judge with these settings; name the "
                    "folder by replay_folder."
                )
        self._asked = _Asked(engine, policy, recording=recording, is_replay=is_replay, log=tell)

    def calls(self, group: Sequence[Finished]) -> list[Call]:
        """A call for each episode."""
        judgements = [_Judgement(judge=self, prompt=self.prompt(one)) for one in group]
        return [
            Call(
                members=(index,),
                make=one.make,
                read=lambda score: [Measured(score=score)],
                records=one.records,
            )
            for index, one in enumerate(judgements)
        ]

    def lacks(self, task: Task) -> list[str]:
        """Accepted answers, where the prompt has a place for them and the task none."""
        return ["answers"] if "{answers}" in self.settings.prompt and not task.answers else []

    def prompt(self, one: Finished) -> str:
        """The prompt about an episode."""
        task = one.episode.task
        asked = [m["content"] for m in task.messages or () if m["role"] == "user"]
        texts = {
            "question": task.question if task.question is not None else (asked or [""])[-1],
            "response": one.episode.response,
            "answers": " | ".join(task.answers),
        }
        return _PLACE.sub(lambda place: texts[place[1]], self.settings.prompt)

    def ask(self, prompt: str) -> Answer:
        """The reply to a prompt, or why there is none, and what that took."""
        assert self._asked is not None, "open comes first"
        [answer] = self._asked.answer_all([prompt])
        return replace(answer, record=replace(answer.record, tool=self.name))


@dataclass(eq=False, kw_only=True)
class _Judgement:
    """A judge's view of one episode."""

    judge: Judge
    prompt: str
    began: float | None = None  # on the monotonic clock
    answer: Answer | None = None

    def make(self) -> float:
        """Asks the judge; gives its score, from 0 to 1.

        Raises:
            ToolError: it says nothing that can be read.
        """
        self.began = time.monotonic()
        self.answer = self.judge.ask(self.prompt)
        if isinstance(self.answer.found, ToolError):
            raise ToolError(f"the judge {self.judge.name!r} gave no score: {self.answer.found}")
        return read_number(self.answer.found, self.judge.settings)

    def records(self) -> list[CallRecord]:
        """The call's record; one attempt if it was begun and nothing is known of it."""
        if self.answer is not None:
            return [self.answer.record]
        return [
            CallRecord(
                call=self.prompt,
                tool=self.judge.name,
                attempts=int(self.began is not None),
                waited_s=time.monotonic() - self.began if self.began is not None else 0.0,
                error="not waited for any longer",
            )
        ]


class _Asked(ResilientSearch):
    """Guard around a judge's endpoint."""

    what, section = "the judge", "config.reward.judges[..]"
