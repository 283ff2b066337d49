"""A server with the API of verifiers' training client, which answers with given texts."""

import contextlib
import threading

from jaxrl.data.tokenizer import Tokenizer
from tests.qwen import qwen3
from tests.servers import Reply, served


class Scripted:
    """Answers the n-th request to an address with the n-th text, and records everything.

    Attributes:
        prompts: Token ids of the prompts, by address.
        answers: Token ids of the answers, by address.
        requests: Received requests for answers.
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
        self.requests = []
        self.is_over = threading.Event()

    def answer(self, request):
        """Answer a request for a list of models or for a completion."""
        if request.method == "GET":
            length = self.lengths.get(request.path.removesuffix("/v1/models"), 2048)
            return {"data": [{"id": "tiny", "max_model_len": length}]}
        address = request.path.removesuffix("/inference/v1/generate")
        turn = len(self.answers.setdefault(address, []))
        if turn and address in self.silent:
            self.is_over.wait()
            return Reply(status=503)
        if turn and address in self.refusals:
            return Reply({"error": {"message": self.refusals[address], "type": "refused"}}, 400)
        ids = [*self.tokenizer.encode(self.texts[turn]), self.tokenizer.eos_ids[0]]
        self.requests.append(request)
        self.prompts.setdefault(address, []).append(request.json["token_ids"])
        self.answers[address].append(ids)
        logprobs = [
            {"token": f"token_id:{id}", "logprob": -0.5 - 0.001 * index}
            for index, id in enumerate(ids)
        ]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop"}
        choice["logprobs"] = {"content": logprobs}
        return {"request_id": f"{address}-{turn}", "choices": [choice]}


@contextlib.contextmanager
def serving(script):
    """Yield the port of a server that answers by a script."""
    with served(script.answer) as server:
        yield int(server.url.rpartition(":")[2])
        script.is_over.set()
