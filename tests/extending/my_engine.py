import urllib.parse
import urllib.request

from jaxrl.envs.search.base import SearchEngine


class Engine(SearchEngine):
    """A server that answers `GET <url>?query=..` with text."""

    def __init__(self, *, url: str = "http://localhost:8000/search", timeout_s: float = 30.0):
        self._url, self._timeout_s = url, timeout_s

    def run(self, query: str) -> str:
        address = f"{self._url}?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(address, timeout=self._timeout_s) as reply:
            return reply.read().decode()
