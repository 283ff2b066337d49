"""Real servers, in threads of this process, and a search engine for tests."""

import collections
import contextlib
import dataclasses
import http.server
import json
import re
import subprocess
import sys
import threading
import urllib.parse

from jaxrl.envs.base import NO_INFORMATION
from jaxrl.envs.search.base import SearchEngine


@dataclasses.dataclass
class Request:
    """A received request."""

    method: str
    path: str
    params: dict
    headers: dict
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


@dataclasses.dataclass
class Reply:
    """A reply to send: bytes unchanged, text as UTF-8, everything else as JSON.

    After `cut` bytes of the body, the connection is closed.
    """

    body: object = b""
    status: int = 200
    headers: dict = dataclasses.field(default_factory=dict)
    cut: int | None = None

    def content(self):
        if isinstance(self.body, bytes):
            return self.body
        return (self.body if isinstance(self.body, str) else json.dumps(self.body)).encode()


class Server:
    """HTTP server that answers with a function of the request, which returns a Reply or its body.

    Attributes:
        requests: Received requests, in order.
        most_at_once: Largest number of concurrent requests.
        num_connections: Number of connections opened.
    """

    def __init__(self, answer):
        self.requests = []
        self.most_at_once = self.num_connections = self._now = 0
        lock = threading.Lock()
        owner = self

        # Requests are handled in threads, so the counts are changed under the lock.
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # connections are kept

            def setup(self):
                super().setup()
                with lock:
                    owner.num_connections += 1

            def handle_one_request(self):
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def do_GET(self):
                url = urllib.parse.urlsplit(self.path)
                params = dict(urllib.parse.parse_qsl(url.query))
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.command, url.path, params, headers, body)
                with lock:
                    owner.requests.append(request)
                    owner._now += 1
                    owner.most_at_once = max(owner.most_at_once, owner._now)
                try:
                    reply = answer(request)
                finally:
                    with lock:
                        owner._now -= 1
                self.reply(reply if isinstance(reply, Reply) else Reply(reply))

            do_POST = do_HEAD = do_GET  # noqa: N815

            def reply(self, reply):
                content = reply.content()
                self.send_response(reply.status)
                headers = {"Content-Length": str(len(content)), **reply.headers}
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content[: reply.cut])
                self.close_connection |= reply.cut is not None

            def log_message(self, *_):
                pass

        # Tests close connections early; do not print these errors.
        class Quiet(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_):
                pass

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def served(answer):
    server = Server(answer)
    try:
        yield server
    finally:
        server.close()


class KeywordSearch(SearchEngine):
    """Mock engine that returns the text of the first keyword, in order, that the query contains."""

    def __init__(self, mapping):
        self._texts = {keyword.lower(): text for keyword, text in mapping.items()}

    def run(self, query, /):
        lowered = query.lower()
        texts = (text for keyword, text in self._texts.items() if keyword in lowered)
        return next(texts, f"{NO_INFORMATION} for: {query}")


def words(text):
    return collections.Counter(re.findall(r"\w+", text.lower()))


class Retriever:
    """Search-R1's and FlashRAG's published server protocols, with ranking by common words.

    Args:
        documents: Dicts with `id` and `contents`.
    """

    def __init__(self, documents):
        self._documents = documents

    def best(self, query, count):
        wanted = words(query)
        scored = [((words(d["contents"]) & wanted).total(), d) for d in self._documents]
        matches = [(d, float(score)) for score, d in scored if score]
        return sorted(matches, key=lambda match: (-match[1], match[0]["id"]))[:count]

    def __call__(self, request):
        fields = request.json
        if request.path == "/retrieve":
            assert isinstance(fields["queries"], list)
            results = [self.best(query, fields.get("topk") or 3) for query in fields["queries"]]
            if fields.get("return_scores"):
                pairs = [[{"document": d, "score": s} for d, s in result] for result in results]
                return {"result": pairs}
            return {"result": [[d for d, _ in result] for result in results]}
        if request.path in ("/batch_search", "/search"):
            is_batch = request.path == "/batch_search"
            assert isinstance(fields["query"], list if is_batch else str)
            queries = fields["query"] if is_batch else [fields["query"]]
            results = [self.best(query, fields.get("top_n", 10)) for query in queries]
            documents = [[d for d, _ in result] for result in results]
            scores = [[s for _, s in result] for result in results]
            if not is_batch:
                [documents], [scores] = documents, scores
            return [documents, scores] if fields.get("return_score") else documents
        return Reply({"detail": "Not Found"}, 404)


@contextlib.contextmanager
def retriever_command(corpus, *arguments):
    """Run examples/serve_retriever.py as a process; yield the process and its URL."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "examples.serve_retriever", f"--corpus={corpus}"),
            *("--port=0", *arguments),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert line.startswith(f"serving {corpus} at http://127.0.0.1:"), process.stderr.read()
        yield process, line.split()[3]
    finally:
        process.kill()
        process.communicate()
