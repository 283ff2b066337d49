"""A tiny model behind a real server, in threads of this process."""

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
CONFIG = dataclasses.replace(SMALL, vocab_size=TOKENIZER.num_tokens + 5, max_positions=2048)
PARAMS = tiny_params(CONFIG)
MAX_TOTAL = 512
MODEL = ServedModel(
    name="tiny",
    tokenizer=TOKENIZER,
    history=ChatHistory(TOKENIZER, max_prompt_tokens=MAX_TOTAL - 1),
    max_total_tokens=MAX_TOTAL,
)


def make_engine(params=PARAMS, config=CONFIG, kind=ServedEngine, **settings):
    """An engine over weights."""
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
            "max_prompt_tokens": MAX_TOTAL - 1,
            **settings,
        },
    )
    engine.set_weights(params)
    return engine


class Client:
    """Requests over HTTP, as raw as a test wants them."""

    def __init__(self, port, prefix=""):
        self.port, self.prefix = port, prefix

    def raw(self, method, path, body=None, headers=None, host=None):
        """Status, headers and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        given = {"Host": host or f"127.0.0.1:{self.port}", **(headers or {})}
        try:
            connection.request(method, self.prefix + path, body=body, headers=given)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def post(self, path, value, **headers):
        """Status and JSON."""
        given = {name.replace("_", "-"): text for name, text in headers.items()}
        status, _, body = self.raw("POST", path, json.dumps(value).encode(), given)
        return status, json.loads(body)

    def chat(self, messages="hello", headers=None, **fields):
        """The answer of a chat."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 12, **fields}
        status, value = self.post("/v1/chat/completions", body, **(headers or {}))
        assert status == 200, value
        return value

    def stream(self, path, body):
        """Values of the events of a stream, and names."""
        status, headers, data = self.raw("POST", path, json.dumps(body).encode())
        assert status == 200, data
        assert headers["content-type"].startswith("text/event-stream")
        blocks = [block.splitlines() for block in data.decode().strip().split("\n\n")]
        return [
            (
                next((one[7:] for one in block if one.startswith("event: ")), ""),
                next(one[6:] for one in block if one.startswith("data: ")),
            )
            for block in blocks
        ]

    def generate(self, token_ids, **sampling):
        """The one choice of an answer in ids."""
        sampling = {"stop_token_ids": [], "logprobs": 1, "max_tokens": 12, **sampling}
        body = {"model": "tiny", "token_ids": token_ids, "sampling_params": sampling}
        status, value = self.post("/inference/v1/generate", body)
        assert status == 200, value
        return value["choices"][0]

    def metrics(self):
        """Values by name."""
        status, _, body = self.raw("GET", "/metrics")
        assert status == 200
        lines = [one for one in body.decode().splitlines() if not one.startswith("#")]
        return {name: float(value) for name, value in (one.rsplit(" ", 1) for one in lines)}

    def until(self, condition, seconds=30.0):
        """Waits until metrics fulfil a condition; these."""
        ends = time.monotonic() + seconds
        while not condition(found := self.metrics()):
            assert time.monotonic() < ends, found
            time.sleep(0.01)
        return found


@contextlib.contextmanager
def serving(engine, *, host="127.0.0.1", max_queue=256, max_cached_rows=0, **settings):
    """A server over an engine; yields it and a client."""
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
