"""OpenAI-compatible endpoints for chat completions, as judges and external policies ask them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from jaxrl.envs.base import ToolError
from jaxrl.envs.search.resilient import Policy
from jaxrl.utils.http_client import Bounds, JsonClient, Request, key_of

MAX_REPLY_MIB = 4.0
_MAX_SHOWN = 200  # characters of a reply that an error shows


class Completions:
    """Asks one endpoint; nothing is asked twice."""

    def __init__(
        self, url: str, *, section: str, key_env: str, timeout_s: float, connections: int
    ) -> None:
        """Opens no connection yet.

        Args:
            url: of the endpoint, up to `/chat/completions`.
            section: of the configuration, for messages.
            key_env: environment variable with the key; "" for none.
            timeout_s: of a request.
            connections: requests in flight at most.

        Raises:
            ValueError: the key's environment variable is not set.
        """
        secret = key_of(section, key_env) if key_env else ""
        address = urlsplit(url)  # with parameters, as Azure's api-version
        self._url = address._replace(path=f"{address.path.rstrip('/')}/chat/completions").geturl()
        self._client = JsonClient(
            Bounds(timeout_s=timeout_s, connections=connections, max_mib=MAX_REPLY_MIB),
            headers={"Authorization": f"Bearer {secret}"} if secret else {},
        )

    def ask(self, body: Mapping[str, Any]) -> Any:
        """The JSON that a request is answered with.

        Raises:
            ToolError: there is none.
        """
        [answer] = self._client.ask([Request(url=self._url, body=dict(body))])
        if isinstance(answer, ToolError):
            raise answer
        return answer


def policy_of(
    settings: Any,
    *,
    max_concurrent: int,
    cache_mib: float = 0.0,
    queries_per_second: float = 0.0,
) -> Policy:
    """The policy of asking an endpoint, from the `ChatSettings` of a model or `JudgeSettings`."""
    return Policy(
        cache_mib=cache_mib,
        cache_ttl_s=0.0,
        queries_per_second=queries_per_second,
        max_concurrent=max_concurrent,
        deadline_s=2 * settings.deadline_s,  # the client keeps it; this is if that fails
        retries=settings.retries,
        backoff_s=settings.backoff_s,
        breaker_failures=8,
        breaker_rest_s=5.0,
        outage_deadline_s=settings.outage_deadline_s,
        on_outage="empty",  # which is an error for each episode, and no score
    )


def first_choice(answer: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The first choice of an answer, and its message.

    Raises:
        ToolError: it has none.
    """
    try:
        choice = answer["choices"][0]
        message = choice["message"]
    except (LookupError, TypeError):
        message = None
    if not isinstance(message, dict):
        raise ToolError(f"the reply {answer!r:.{_MAX_SHOWN}} has no choices[0].message")
    return choice, message


def content_of(answer: Any) -> str:
    """The text of an answer.

    Raises:
        ToolError: it has none.
    """
    _, message = first_choice(answer)
    content = message.get("content")
    if not isinstance(content, str):
        raise ToolError(f"the reply {answer!r:.{_MAX_SHOWN}} has no choices[0].message.content")
    return content
