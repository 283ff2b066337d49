"""Client for OpenAI-compatible chat completions, shared by judges and external policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jaxrl.envs.base import ToolError
from jaxrl.envs.search.recording import Recording
from jaxrl.envs.search.resilient import ReplayOnly, ResilientSearch, RetryConfig
from jaxrl.envs.tools.base import Tool
from jaxrl.utils.http_client import ClientLimits, JsonClient, Request, read_api_key

MAX_REPLY_MIB = 4.0
_MAX_SHOWN = 200  # characters of a reply that an error shows


class Endpoint(Tool):
    """Client of a chat-completions endpoint. Each call is one request."""

    name, blank = "endpoint", ""

    def __init__(self, settings: Any, key: str) -> None:
        """Read the API key without connecting.

        Args:
            settings: `JudgeSettings`, or the keys of `policy.openai`.
            key: Config key of the settings, for messages.

        Raises:
            ValueError: The key's environment variable is not set.
        """
        self.settings, self.key = settings, key
        secret = read_api_key(f"{key}.key_env", settings.key_env) if settings.key_env else ""
        address = urlsplit(settings.url)  # with parameters, such as Azure's api-version
        self._url = address._replace(path=f"{address.path.rstrip('/')}/chat/completions").geturl()
        self._client = JsonClient(
            ClientLimits(
                timeout_s=settings.deadline_s,
                connections=settings.max_concurrent,
                max_mib=MAX_REPLY_MIB,
            ),
            headers={"Authorization": f"Bearer {secret}"} if secret else {},
        )

    def ask(self, body: Mapping[str, Any]) -> Any:
        """Send a request and return the JSON of its answer.

        Raises:
            ToolError: The request failed.
        """
        [answer] = self._client.send_all([Request(url=self._url, body=dict(body))])
        if isinstance(answer, ToolError):
            raise answer
        return answer


def first_choice(answer: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the first choice of an answer, and its message.

    Raises:
        ToolError: The answer has no choice with a message.
    """
    try:
        choice = answer["choices"][0]
        message = choice["message"]
    except (LookupError, TypeError):
        message = None
    if not isinstance(message, dict):
        raise ToolError(f"the reply {answer!r:.{_MAX_SHOWN}} has no choices[0].message")
    return choice, message


def open_guard(
    guard: type[ResilientSearch],
    endpoint: type[Endpoint],
    settings: Any,
    *,
    key: str,
    identity: Mapping[str, Any],
    folder: str,
    workdir: Path | None,
    process: int,
    log: Callable[[str], None],
) -> ResilientSearch:
    """Wrap an endpoint with retries, limits and a recording of its answers.

    Args:
        guard: Class of the guard.
        endpoint: Class of the endpoint, not instantiated if only a recording is replayed.
        settings: Settings of the endpoint; see `Endpoint`.
        key: Config key of the settings, for messages.
        identity: Settings that determine an answer. A recording is valid only for equal settings.
        folder: Name of the recording's folder in the workdir.
        workdir: Folder of the run, or None.
        process: Index of this process.
        log: Function that logs outages.

    Raises:
        ValueError: The key's environment variable is not set.
        FileNotFoundError: `replay` is "only", but there is no recording.
    """
    policy = RetryConfig(
        cache_mib=settings.cache_mib,
        cache_ttl_s=0.0,
        queries_per_second=settings.queries_per_second,
        max_concurrent=settings.max_concurrent,
        deadline_s=2 * settings.deadline_s,  # reached only if the client misses its own
        retries=settings.retries,
        backoff_s=settings.backoff_s,
        breaker_failures=8,
        breaker_rest_s=5.0,
        outage_deadline_s=settings.outage_deadline_s,
        on_outage="empty",  # an error of each episode, not a score
    )
    is_replay, recording = settings.replay == "only", None
    where = settings.replay_folder or (workdir and workdir / folder)
    if is_replay or (where and settings.replay == "record"):
        recording = Recording(Path(where or folder), identity, process=process, log=log)
        if is_replay and not len(recording):
            raise FileNotFoundError(
                f"config.{key}.replay is 'only', but {recording.folder} has no replies with these "
                f"settings; name the folder by config.{key}.replay_folder."
            )
    engine = ReplayOnly() if is_replay else endpoint(settings, key)
    return guard(engine, policy, recording=recording, is_replay=is_replay, log=log)
