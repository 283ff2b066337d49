"""Client for OpenAI-compatible chat completions, used by judges and external policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jaxrl.envs.base import ToolError
from jaxrl.envs.search.recording import Recording
from jaxrl.envs.search.resilient import ReplayOnly, ResilientSearch, RetryConfig
from jaxrl.envs.tools.base import Tool
from jaxrl.utils.http_client import HttpRequest, JsonClient, read_api_key

MAX_REPLY_MIB = 4.0
_MAX_QUOTED = 200  # characters of a response to quote in an error message


class EndpointTool(Tool):
    """Client for a chat-completions endpoint. Each call sends one request."""

    name, blank = "endpoint", ""

    def __init__(self, settings: Any, key: str) -> None:
        """Read the API key without opening a connection.

        Args:
            settings: `JudgeSettings`, or an object with the keys of `policy.openai` as attributes.
            key: Config key of the settings, for error messages.

        Raises:
            ValueError: The environment variable of the API key is not set.
        """
        self.settings, self.key = settings, key
        api_key = read_api_key(f"{key}.key_env", settings.key_env) if settings.key_env else ""
        url_parts = urlsplit(settings.url)  # may have query parameters, such as api-version (Azure)
        self._url = url_parts._replace(
            path=f"{url_parts.path.rstrip('/')}/chat/completions"
        ).geturl()
        self._client = JsonClient(
            timeout_s=settings.deadline_s,
            connections=settings.max_concurrent,
            max_mib=MAX_REPLY_MIB,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        )

    def send_request(self, body: Mapping[str, Any]) -> Any:
        """Send a request; return the JSON response.

        Raises:
            ToolError: The request failed.
        """
        [response] = self._client.send_all([HttpRequest(url=self._url, body=dict(body))])
        if isinstance(response, ToolError):
            raise response
        return response


def get_first_choice(response: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the first choice of a chat completion, and its message.

    Raises:
        ToolError: The completion has no choice, or the choice has no message.
    """
    try:
        choice = response["choices"][0]
        message = choice["message"]
    except (LookupError, TypeError):
        message = None
    if not isinstance(message, dict):
        raise ToolError(f"the response {response!r:.{_MAX_QUOTED}} has no choices[0].message")
    return choice, message


def wrap_endpoint(
    wrapper_class: type[ResilientSearch],
    endpoint_class: type[EndpointTool],
    settings: Any,
    *,
    key: str,
    identity: Mapping[str, Any],
    folder: str,
    workdir: Path | None,
    process: int,
    log: Callable[[str], None],
) -> ResilientSearch:
    """Wrap an endpoint with retries, rate limits and a recording of its responses.

    Args:
        wrapper_class: `ResilientSearch` subclass that wraps the endpoint.
        endpoint_class: `EndpointTool` subclass, not instantiated if `replay` is "only".
        settings: Settings of the endpoint; see `EndpointTool`.
        key: Config key of the settings, for error messages.
        identity: Settings that affect responses. A recording is reused only if these match.
        folder: Name of the recording's default folder in `workdir`.
        workdir: Folder of the run, or None.
        process: JAX process index.
        log: Function that logs a message about an outage.

    Raises:
        ValueError: The environment variable of the API key is not set.
        FileNotFoundError: `replay` is "only", and there is no recording.
    """
    retry_config = RetryConfig(
        cache_mib=settings.cache_mib,
        cache_ttl_s=0.0,
        queries_per_second=settings.queries_per_second,
        max_concurrent=settings.max_concurrent,
        deadline_s=2 * settings.deadline_s,  # a fallback, since the client also has a deadline
        retries=settings.retries,
        backoff_s=settings.backoff_s,
        breaker_failures=8,
        breaker_rest_s=5.0,
        outage_deadline_s=settings.outage_deadline_s,
        on_outage="empty",  # an environment error, not a score
    )
    is_replay, recording = settings.replay == "only", None
    recording_dir = settings.replay_folder or (workdir and workdir / folder)
    if is_replay or (recording_dir and settings.replay == "record"):
        recording = Recording(Path(recording_dir or folder), identity, process=process, log=log)
        if is_replay and not len(recording):
            raise FileNotFoundError(
                f"config.{key}.replay is 'only', but {recording.folder} has no replies with these "
                f"settings; set config.{key}.replay_folder to the folder that has them."
            )
    engine = ReplayOnly() if is_replay else endpoint_class(settings, key)
    return wrapper_class(engine, retry_config, recording=recording, is_replay=is_replay, log=log)
