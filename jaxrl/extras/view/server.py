"""The page over HTTP, for this machine alone.

Whoever reads a run's files may be shown texts that a model or a web page wrote, and any page in the
same browser may send requests to this port. So: the address is the loopback's; the `Host` must name
it, or another site could have its own name resolved to it and read the answers; only GET is
answered; addresses are names in a table, and none is ever a path; the page may load nothing but
itself, and can turn no text into elements or scripts.
"""

from __future__ import annotations

import errno
import json
import math
import re
import socket
import sys
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jaxrl.extras.view.index import CORRECT, Filter
from jaxrl.extras.view.pages import SORTS, Pages
from jaxrl.extras.view.values import plain
from jaxrl.utils.text import printable

ADDRESS = "127.0.0.1"
NAMES = ("localhost", "127.0.0.1", "[::1]")
"""Hosts by which a browser on this machine calls the page."""

IDLE_S = 60.0
"""Seconds that a connection may be silent."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Sent with every answer."""

FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
"""Files of the page by their addresses."""

_HERE = Path(__file__).parent


class RefusedError(Exception):
    """A request that is not answered, with the status that says so."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class Asked:
    """Parameters of a request, each of which must be asked for by what answers it."""

    def __init__(self, query: str):
        """Parses the part of an address behind its question mark.

        Raises:
            RefusedError: it is no list of names and values.
        """
        try:
            self._given = parse_qs(
                query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=200
            )
        except ValueError as error:
            raise RefusedError(400, f"the address cannot be read: {error}.") from error

    def texts(self, name: str) -> list[str]:
        """All values of a name."""
        return self._given.pop(name, [])

    def text(self, name: str, default: str = "") -> str:
        """The value of a name."""
        values = self.texts(name)
        if len(values) > 1:
            raise RefusedError(400, f"{name} is given {len(values)} times; expected once.")
        return values[0] if values else default

    def count(self, name: str) -> int:
        """A whole number, 0 or more, that must be there."""
        value = self.optional_count(name)
        if value is None:
            raise RefusedError(400, f"{name} is missing; expected a whole number.")
        return value

    def optional_count(self, name: str) -> int | None:
        """A whole number, 0 or more; None where there is none."""
        return _count(name, text) if (text := self.text(name)) else None

    def counts(self, name: str) -> list[int]:
        """Whole numbers, 0 or more."""
        return [_count(name, text) for text in self.texts(name)]

    def optional_number(self, name: str) -> float | None:
        """A finite number; None where there is none."""
        if not (text := self.text(name)):
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise RefusedError(400, f"{name} is {text!r:.40}; expected a number.")
        return value

    def choice(self, name: str, known: Mapping[str, Any], default: str) -> str:
        """One of some names."""
        text = self.text(name, default)
        if text and text not in known:
            raise RefusedError(400, f"{name} is {text!r:.40}; expected {', '.join(known)}.")
        return text

    def end(self) -> None:
        """Refuses what nobody has asked for.

        Raises:
            RefusedError: names it.
        """
        if self._given:
            raise RefusedError(400, f"unknown: {', '.join(self._given)!r:.80}.")


def _count(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise RefusedError(400, f"{name} is {text!r:.40}; expected a whole number from 0 on.")
    return int(text)


def _series(pages: Pages, asked: Asked) -> Any:
    since = {}
    for text in asked.texts("since"):
        match = re.fullmatch(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})", text)
        if match is None:
            raise RefusedError(400, f"since is {text!r:.40}; expected run.generation.records.")
        run, generation, records = map(int, match.groups())
        since[run] = (generation, records)
    return lambda names=asked.texts("name"): pages.series(names, since)


def _trajectories(pages: Pages, asked: Asked) -> Any:
    wanted = Filter(
        outcomes=tuple(asked.texts("outcome")),
        correct=asked.choice("correct", CORRECT, ""),
        reward_min=asked.optional_number("reward_min"),
        reward_max=asked.optional_number("reward_max"),
        step_min=asked.optional_count("step_min"),
        step_max=asked.optional_count("step_max"),
        text=asked.text("text"),
    )
    runs, page = asked.counts("run"), asked.optional_count("page") or 0
    sort = asked.choice("sort", SORTS, "") or "step"
    is_descending = asked.choice("order", {"up": False, "down": True}, "down") == "down"
    return lambda: pages.trajectories(
        wanted, runs=runs, sort=sort, is_descending=is_descending, page=page
    )


def _trajectory(pages: Pages, asked: Asked) -> Any:
    place = [asked.count(name) for name in ("run", "step", "line")]
    return lambda: pages.trajectory(*place)


def _questions(pages: Pages, asked: Asked) -> Any:
    text, runs = asked.text("text"), asked.counts("run")
    return lambda: pages.questions(text, runs)


def _answer(pages: Pages, asked: Asked) -> Any:
    run, step, row = (asked.count(name) for name in ("run", "step", "row"))
    stage, suite = asked.text("stage"), asked.text("suite")
    return lambda: pages.answer(run, stage, step, suite, row)


ANSWERS: Mapping[str, Callable[[Pages, Asked], Any]] = {
    "/api/state": lambda pages, asked: pages.state,
    "/api/metrics": lambda pages, asked: pages.metrics,
    "/api/series": _series,
    "/api/trajectories": _trajectories,
    "/api/trajectory": _trajectory,
    "/api/questions": _questions,
    "/api/question": lambda pages, asked: lambda key=asked.text("key"): pages.question(key),
    "/api/answer": _answer,
}
"""Functions by address: they read the parameters, and return what makes the answer."""


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    server_version = "jaxrl"
    sys_version = ""
    timeout = IDLE_S
    server: Server

    def __getattr__(self, name: str) -> Any:
        """Refusal of any other method than GET, as `do_METHOD`, whatever it is called."""
        if name.startswith("do_"):
            return lambda: self._refuse(405, f"{self.command!r:.20} is not answered; only GET is.")
        raise AttributeError(name)

    def do_GET(self) -> None:
        """Answers what the tables name, if the request is from this machine's browser."""
        try:
            address = urlsplit(self.path)
            self._check(is_page=address.path == "/")
            if address.path in self.server.files:
                content, kind = self.server.files[address.path]
                self._send(200, content, kind)
                return
            make = ANSWERS.get(address.path)
            if make is None:
                raise RefusedError(404, "there is no such page.")
            asked = Asked(address.query)
            answer = make(self.server.pages, asked)
            asked.end()
            value = answer()
        except RefusedError as error:
            self._refuse(error.status, str(error))
        except LookupError as error:
            self._refuse(404, str(error.args[0] if error.args else error))
        except (ValueError, OSError) as error:
            self._refuse(409, str(error))
        except Exception as error:  # a file with something in it that nobody thought of
            self._refuse(500, f"{type(error).__name__}: {error}")
        else:
            content = json.dumps(plain(value), allow_nan=False).encode()
            self._send(200, content, "application/json")

    def _check(self, *, is_page: bool) -> None:
        """Refuses requests that neither a user nor this server's page sends.

        Args:
            is_page: the page itself is asked for, to which a link of another site may lead.

        Raises:
            RefusedError: says what is wrong.
        """
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0].lower() not in self.server.hosts:
            given = ", ".join(hosts) or "nothing"
            raise RefusedError(
                403,
                f"the Host is {printable(given)!r:.80}; expected {self.server.hosts[0]}. Through "
                "a tunnel, use the same port on both sides.",
            )
        length = self.headers.get("Content-Length", "0")
        if length != "0" or "Transfer-Encoding" in self.headers:
            raise RefusedError(400, "a request with a body; expected none.")
        site = self.headers.get("Sec-Fetch-Site", "none")
        if not is_page and site not in ("none", "same-origin"):
            raise RefusedError(403, "the request is another site's; open the page by its address.")

    def _refuse(self, status: int, text: str) -> None:
        self.close_connection = True  # a body that was not read is no next request
        self._send(status, json.dumps({"error": printable(text)}).encode(), "application/json")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuses what is no HTTP with the headers of every answer."""
        self._refuse(code, message or "the request cannot be read.")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if status == 405:
            self.send_header("Allow", "GET")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Writes nothing: the terminal is the user's."""


class Server(ThreadingHTTPServer):
    """The server of some pages, on the loopback address.

    Attributes:
        pages: that it answers from.
        files: content and type by address.
        hosts: values of `Host` that are answered.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, pages: Pages, port: int):
        """Takes a port.

        Args:
            pages: to answer from.
            port: 0 for any that is free.

        Raises:
            OSError: it cannot be had; in use, it says so.
        """
        self.pages = pages
        self.files = {
            address: ((_HERE / name).read_bytes(), kind) for address, (name, kind) in FILES.items()
        }
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise OSError(
                f"port {port} is in use by another program; name a free one with --port=N, or "
                "--port=0 for any."
            ) from error
        self.hosts = [f"{name}:{self.server_port}" for name in NAMES]
        if self.server_port == 80:
            self.hosts += NAMES

    @property
    def address(self) -> str:
        """Address at which a browser finds the page."""
        return f"http://{ADDRESS}:{self.server_port}/"

    def handle_error(
        self, request: socket.socket | tuple[bytes, socket.socket], client: Any
    ) -> None:
        """Ignores browsers that have gone away; tells other errors as Python does."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client)
