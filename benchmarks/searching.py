"""Environment with real searches for a policy with random weights, which cannot write queries.

A turn ends at any of a few bytes, which a random policy samples about every `turn_tokens` tokens.
The checksum of a turn's text selects words of the corpus as the query, and the documents that BM25
finds are the observation. The same tokens thus always cause the same searches.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import Env, Episode, Message, Observation, Outcome, Reward, StepResult, Task
from jaxrl.envs.search.bm25 import LocalSearch
from jaxrl.types import Draw

NUM_DOCUMENTS = 2_000
DOCUMENT_WORDS = 60
NUM_WORDS = 5_000


def build_byte_tokenizer() -> Tokenizer:
    """Build a tokenizer with one token per byte and an end-of-turn token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>"])
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend,
            eos_token="<|im_end|>",
            chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
        )
    )


def make_word(number: int) -> str:
    """Return the corpus word with this number."""
    return f"w{number}"


def write_corpus(path: Path) -> None:
    """Write documents whose words follow a Zipf distribution: few frequent, most rare."""
    rng = np.random.default_rng(0)
    word_numbers = np.minimum(rng.zipf(1.3, (NUM_DOCUMENTS, DOCUMENT_WORDS)), NUM_WORDS) - 1
    with path.open("w", encoding="utf-8") as file:
        for number, words in enumerate(word_numbers):
            text = " ".join(make_word(item) for item in words)
            file.write(json.dumps({"id": str(number), "title": f"t{number}", "text": text}) + "\n")


class RandomSearches(Env):
    """Environment that searches a real index after each turn, up to `max_searches` per episode.

    Attributes:
        latency_s: Seconds added to each call of `step`.
        busy_s: Total seconds spent in calls of `step`, summed over concurrent calls.
        num_searches: Number of searches so far.
    """

    reward_parts = ()

    def __init__(
        self, folder: Path, *, max_searches: int, turn_tokens: int, prompt_tokens: int
    ) -> None:
        """Write a corpus to `folder` and index it there."""
        write_corpus(folder / "corpus.jsonl")
        self._search = LocalSearch(folder / "corpus.jsonl")
        # A random policy writes one of these bytes about every `turn_tokens` tokens.
        self.stop_strings = tuple(chr(33 + i) for i in range(max(256 // turn_tokens, 1)))
        self._max_searches, self._prompt_tokens = max_searches, prompt_tokens
        self._lock = threading.Lock()
        self.latency_s = self.busy_s = 0.0
        self.num_searches = 0

    def start(self, tasks: Sequence[Task]) -> list[list[Message]]:
        """Return questions that all have the same length."""
        width = self._prompt_tokens
        return [[{"role": "user", "content": (f"{task.id} " * width)[:width]}] for task in tasks]

    def step(self, episodes: Sequence[Episode], texts: Sequence[str]) -> list[StepResult]:
        """Search for each turn. Episodes end after the last search, or after 1 in 4 turns."""
        started = time.perf_counter()
        time.sleep(self.latency_s)
        results = [self._make_result(*item) for item in zip(episodes, texts, strict=True)]
        with self._lock:
            self.busy_s += time.perf_counter() - started
            self.num_searches += sum(reply.tool_call is not None for reply in results)
        return results

    def _make_result(self, episode: Episode, text: str) -> StepResult:
        number = zlib.crc32(text.encode("utf-8", "replace"))
        if len(episode.turns) >= self._max_searches or number % 4 == 0:
            return StepResult(outcome=Outcome.ANSWERED)
        query = " ".join(make_word(number // divisor % NUM_WORDS) for divisor in (1, 7, 49))
        result = Observation(prefix="\n", body=self._search.run(query), suffix="\n")
        return StepResult(observation=result, tool_call=query)

    def score(self, group: Sequence[Episode]) -> list[Reward]:
        """Return rewards of 0 or 1, determined by the checksum of the response."""
        return [
            Reward(total=zlib.crc32(e.response.encode("utf-8", "replace")) % 2, parts={},
                   final_answer="")
            for e in group
        ]  # fmt: skip


def make_draws(count: int) -> list[Draw]:
    """Return `count` different tasks."""
    tasks = [Task(id=f"q{index}", question=f"q{index}") for index in range(count)]
    return [Draw(task=task, stream_index=index) for index, task in enumerate(tasks)]
