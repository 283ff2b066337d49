"""A tiny model and a real server in threads of this process."""

import contextlib
import dataclasses
import http.client
import json
import time

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.extras.serve.chats import ChatHistory
from jaxrl.extras.serve.engine import ServedEngine
from jaxrl.extras.serve.generation import ServedModel
from jaxrl.extras.serve.server import Endpoint, Server, bind_port
from jaxrl.extras.serve.worker import Worker
from jaxrl.sampling.stop_strings import StopAutomaton
from tests.helpers import tiny_params
from tests.qwen import qwen3
from tests.toys import SMALL, one_device_mesh

TOKENIZER = Tokenizer(qwen3())
CONFIG = dataclasses.replace(
    SMALL,
    vocab_size=TOKENIZER.num_tokens + 5,
    max_positions=2048,
    width=96,  # as many tokens can be trained
)
PARAMS = tiny_params(CONFIG)
MAX_TOTAL = 512
MODEL = ServedModel(
    name="tiny",
    tokenizer=TOKENIZER,
    history=ChatHistory(TOKENIZER, max_prompt_tokens=MAX_TOTAL - 1),
    max_total_tokens=MAX_TOTAL,
)


def make_engine(params=PARAMS, config=CONFIG, kind=ServedEngine, **settings):
    """Return an engine with weights."""
    engine = kind(
        config,
        one_device_mesh(),
        StopAutomaton(TOKENIZER.vocab_bytes, ()),
        num_tokens=TOKENIZER.num_tokens,
        eos_ids=TOKENIZER.eos_ids,
        **{
            "num_rows": 4,
            "chunk_tokens": 4,
            "max_total_tokens": MAX_TOTAL,
            **settings,
        },
    )
    engine.row_sizes = engine.row_sizes[-1:]  # each size compiles for seconds
    engine.set_weights(params)
    return engine


class Client:
    """HTTP client of a server."""

    def __init__(self, port, prefix=""):
        self.port, self.prefix = port, prefix

    def raw(self, method, path, body=None, headers=None, host=None):
        """Return status, headers and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Host": host or f"127.0.0.1:{self.port}", **(headers or {})}
        try:
            connection.request(method, self.prefix + path, body=body, headers=headers)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def post(self, path, value, **headers):
        """Return status and JSON."""
        headers = {name.replace("_", "-"): text for name, text in headers.items()}
        status, _, body = self.raw("POST", path, json.dumps(value).encode(), headers)
        return status, json.loads(body)

    def chat(self, messages="hello", headers=None, **fields):
        """Return the response to a chat."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 12, **fields}
        status, value = self.post("/v1/chat/completions", body, **(headers or {}))
        assert status == 200, value
        return value

    def stream(self, path, body):
        """Return the names and data of a stream's events."""
        status, headers, data = self.raw("POST", path, json.dumps(body).encode())
        assert status == 200, data
        assert headers["content-type"].startswith("text/event-stream")
        blocks = data.decode().strip().split("\n\n")
        fields = [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks]
        return [(event.get("event", ""), event["data"]) for event in fields]

    def generate(self, token_ids, **sampling):
        """Return the choice of a response in token ids."""
        sampling = {"stop_token_ids": [], "logprobs": 1, "max_tokens": 12, **sampling}
        body = {"model": "tiny", "token_ids": token_ids, "sampling_params": sampling}
        status, value = self.post("/inference/v1/generate", body)
        assert status == 200, value
        return value["choices"][0]

    def metrics(self):
        """Return the metrics by name."""
        status, _, body = self.raw("GET", "/metrics")
        assert status == 200
        lines = [line for line in body.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def until(self, condition, seconds=30.0):
        """Wait until the metrics fulfil a condition; return them."""
        deadline = time.monotonic() + seconds
        while not condition(metrics := self.metrics()):
            assert time.monotonic() < deadline, metrics
            time.sleep(0.01)
        return metrics


@contextlib.contextmanager
def serving(engine, *, host="127.0.0.1", max_queue=256, max_cached_rows=0, **settings):
    """Start a server with an engine; yield it and a client."""
    bound = bind_port(host, 0, settings.get("key", ""))
    engine.clear()
    worker = Worker(
        engine,
        TOKENIZER.vocab_bytes,
        TOKENIZER.eos_ids,
        max_queue=max_queue,
        max_cached_rows=max_cached_rows,
    )
    server = Server(Endpoint(worker, TOKENIZER, name="tiny", **settings), host, bound)
    try:
        yield server, Client(server.port)
    finally:
        server.shutdown(0.0)
