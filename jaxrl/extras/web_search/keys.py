"""Config keys for web search."""

from typing import Any

from jaxrl.config.keys import FREE, Key, Rule

# fmt: off
KEYS = {
    "search.web.provider": Key("serper", "`serper`, `brave`, `tavily` or `searxng`.",
        one_of=("serper", "brave", "tavily", "searxng")),
    "search.web.url": Key("", "Address of your own service, such as SearXNG. Empty: the "
        "provider's.", restart=FREE),
    "search.web.topk": Key(3, "Results per query.", above=0),
    "search.web.key_env": Key("", "Environment variable that holds the API key. Empty: "
        "`SERPER_API_KEY`, `BRAVE_API_KEY`, `TAVILY_API_KEY`; none for `searxng`.",
        restart=FREE),
    "search.web.timeout_s": Key(30.0, "Seconds per request.",
        above=0, restart=FREE),
    "search.web.connections": Key(8, "Maximum requests in flight.", above=0, restart=FREE),
    "search.web.max_response_mib": Key(16.0, "As `search.http.max_response_mib`.", above=0,
        restart=FREE),
}
# fmt: on


def _is_missing_url(config: Any) -> bool:
    web = config.search.web
    is_self_hosted = config.search.engine == "web" and web.provider == "searxng"
    return bool(is_self_hosted and not web.url and config.has_search)


RULES = (
    Rule(
        "search.web.url", _is_missing_url, "the address of a server, such as http://127.0.0.1:8000"
    ),
)
"""Invalid combinations of keys."""
