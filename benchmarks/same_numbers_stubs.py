"""A tool and an endpoint for the cases of `benchmarks.same_numbers`.

The folder of this file comes after the tree on each run's path, so that revisions without this file
find the tool too.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import threading
import zlib
from collections.abc import Iterator


def shout(text: str) -> str:
    """Converts a text to upper case.

    Args:
        text: The text.
    """
    return f"{text.upper()}!"


class StubEndpoint(http.server.BaseHTTPRequestHandler):
    """OpenAI-compatible endpoint whose responses depend only on the request.

    The model `judge` scores a text by its hash, so that rewards vary and change with any character
    of the text. The model `policy` acts in an episode: it searches for the question, calls `python`
    and `shout`, and answers with a town or job from the first document.
    """

    protocol_version = "HTTP/1.1"  # keeps connections open

    def do_POST(self) -> None:
        """Respond to a chat completions request."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        first, *later = [message["content"] for message in body["messages"]]
        if body["model"] == "judge":
            text = f"Score: {zlib.crc32(first.encode()) % 11}"
        else:
            match = re.search(r"is a (\w+) born in (\w+)", " ".join(later))
            answer = match[1 if "job" in first else 2] if match else "nobody"
            calls = (
                f"<search> {first} </search>",
                f"<python> print({len(first)} * 7) </python>",
                f"<shout> {answer} </shout>",
            )
            num_turns = len(later) // 2  # each followed by an observation
            turns = (*calls, f"<answer> {answer} </answer>")
            text = turns[min(num_turns, len(calls))]
        reply = {
            "choices": [{"message": {"content": text}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": len(first), "completion_tokens": len(text)},
        }
        content = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Suppress the request log."""


@contextlib.contextmanager
def serve_stub() -> Iterator[str]:
    """Serve the endpoint on a free local port and yield its URL."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), StubEndpoint)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
