"""A server with the API of verifiers' training client, which answers with given texts."""

import contextlib
import http.server
import json
import threading

from jaxrl.data.tokenizer import Tokenizer
from tests.qwen import qwen3


class Scripted:
    """Answers the n-th request to an address with the n-th text, and records everything.

    Attributes:
        prompts: Token ids of the prompts, by address.
        answers: Token ids of the answers, by address.
        requests: Headers and bodies of all requests.
        lengths: Maximum lengths of prompts, by address.
        refusals: Messages with which second requests are rejected, by address.
        silent: Addresses whose second requests get no answer.
    """

    def __init__(self, texts, lengths=None, refusals=None, silent=()):
        self.tokenizer = Tokenizer(qwen3())
        self.texts, self.lengths = texts, lengths or {}
        self.refusals, self.silent = refusals or {}, silent
        self.prompts: dict[str, list[list[int]]] = {}
        self.answers: dict[str, list[list[int]]] = {}
        self.requests: list[tuple[dict[str, str], dict]] = []
        self.lock = threading.Lock()

    def answer(self, address, headers, body):
        """Return status and answer of a request."""
        with self.lock:
            turn = len(self.answers.setdefault(address, []))
            if turn and address in self.refusals:
                return 400, {"error": {"message": self.refusals[address], "type": "refused"}}
            ids = [*self.tokenizer.encode(self.texts[turn]), self.tokenizer.eos_ids[0]]
            self.requests.append((headers, body))
            self.prompts.setdefault(address, []).append(body["token_ids"])
            self.answers[address].append(ids)
        logprobs = [
            {"token": f"token_id:{id}", "logprob": -0.5 - 0.001 * index}
            for index, id in enumerate(ids)
        ]
        choice = {
            "index": 0,
            "token_ids": ids,
            "finish_reason": "stop",
            "logprobs": {"content": logprobs},
        }
        return 200, {"request_id": f"{address}-{turn}", "choices": [choice]}


@contextlib.contextmanager
def serving(script):
    """Yield the port of a server that answers by a script."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self, status, value):
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            length = script.lengths.get(self.path.removesuffix("/v1/models"), 2048)
            self.reply(200, {"data": [{"id": "tiny", "max_model_len": length}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            address = self.path.removesuffix("/inference/v1/generate")
            if address in script.silent and script.answers.get(address):
                self.connection.recv(1)  # until the client leaves
                self.close_connection = True
                return
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.reply(*script.answer(address, headers, body))

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
