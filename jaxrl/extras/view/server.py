"""HTTP server for the page, for browsers on this machine only.

A run's files contain text from models and web pages, and any page in the same browser can send
requests to the server. The server therefore listens on the loopback address, checks the `Host`
header (against DNS rebinding), accepts only GET, and opens no files named by requests. The
Content-Security-Policy blocks all other scripts and requests.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jaxrl.extras.view.viewer import Viewer
from jaxrl.utils.text import escape_control_chars

INDEXING_S = 0.5
"""Maximum time for indexing trajectories in a request, in seconds."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response."""

FOLDER = Path(__file__).parent
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
"""File name and content type, by URL path."""


class Handler(BaseHTTPRequestHandler):
    """Request handler of `ViewServer`."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "jaxrl", ""
    timeout = 60.0
    server: ViewServer

    def do_GET(self) -> None:
        """Serve the page's files, and `/api/<address>` with `Viewer.respond`."""
        url = urlsplit(self.path)
        hosts = self.headers.get_all("Host") or []
        site = self.headers.get("Sec-Fetch-Site", "none")
        if len(hosts) != 1 or hosts[0].lower() not in self.server.hosts:
            expected = self.server.hosts[0]
            self._send_error(403, f"Host is {', '.join(hosts)!r:.80}; expected {expected}.")
        elif url.path != "/" and site not in ("none", "same-origin"):
            self._send_error(403, "The request comes from another site.")
        elif url.path in FILES:
            name, content_type = FILES[url.path]
            self._send_content(200, (FOLDER / name).read_bytes(), content_type)
        elif url.path.startswith("/api/"):
            self._serve_api(url.path.removeprefix("/api/"), parse_qs(url.query))
        else:
            self._send_error(404, "The page does not exist.")

    def _serve_api(self, address: str, query: dict[str, list[str]]) -> None:
        viewer = self.server.viewer
        try:
            with self.server.lock:
                if address == "state":
                    viewer.refresh(INDEXING_S)
                has_names = address.startswith("curves/") and "name" in query
                options = {"names": query["name"]} if has_names else {}
                value = viewer.respond(address, **options)
        except LookupError as error:
            self._send_error(404, str(error))
        except (ValueError, OSError) as error:
            self._send_error(409, str(error))
        except Exception as error:  # unexpected file contents must not end the server
            self._send_error(500, f"{type(error).__name__}: {error}")
        else:
            self._send_content(200, json.dumps(value, allow_nan=False).encode(), "application/json")

    def _send_error(self, status: int, text: str) -> None:
        self.close_connection = True
        self._send_content(
            status, json.dumps({"error": escape_control_chars(text)}).encode(), "application/json"
        )

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send JSON errors, with status 405 for unsupported HTTP methods."""
        self._send_error(405 if code == 501 else code, message or "The request is malformed.")

    def _send_content(self, status: int, content: bytes, content_type: str) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Disable request logging."""


class ViewServer(ThreadingHTTPServer):
    """HTTP server on the loopback address.

    Attributes:
        viewer: Viewer that computes the responses.
        lock: Lock that serializes access to the viewer.
        hosts: Accepted values of the `Host` header.
    """

    daemon_threads = True

    def __init__(self, viewer: Viewer, port: int):
        """Bind a port on the loopback address.

        Args:
            viewer: Viewer that computes the responses.
            port: Port number; 0 for any free port.

        Raises:
            OSError: The port cannot be bound.
        """
        self.viewer, self.lock = viewer, threading.Lock()
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            reason = error.strerror
            raise OSError(f"--port={port}: {reason}; choose a free port, or 0.") from error
        names = ("127.0.0.1", "localhost", "[::1]")
        self.hosts = [f"{name}:{self.server_port}" for name in names]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that the browser closed."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)
