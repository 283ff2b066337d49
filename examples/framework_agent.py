"""A Pydantic AI agent, and `play`, which a run calls to train the agent's model.

The agent consists of a system message, a tool and the framework's loop. The trainer provides only a
base URL and a key. `play` runs the agent on a task and returns the reward.

It needs pydantic-ai-slim[openai] but not jaxrl, so it can run in a separate virtual environment.
`configs/quickstart_agent.py` trains with it. To ask a question with any OpenAI-compatible chat
endpoint:

    OPENAI_BASE_URL=http://127.0.0.1:8790/v1 python framework_agent.py data/calls/corpus.jsonl \
        "Where was Ada Kerr born?"
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import re
import string
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

SYSTEM = "Search, then give the answer alone as <answer> answer </answer>."
NO_RESULTS = "No information found"


class Corpus:
    """In-memory BM25 index over JSONL documents with `id`, `title` and `text`."""

    def __init__(self, path: str | Path):
        """Load and index all documents. Words in titles count twice."""
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        self._documents = sorted(
            map(json.loads, filter(None, lines)), key=lambda document: document["id"]
        )
        self._words = [
            Counter(split_words(f"{document['title']} {document['title']} {document['text']}"))
            for document in self._documents
        ]
        self._lengths = [words.total() for words in self._words]
        self._mean = sum(self._lengths) / max(len(self._lengths), 1)
        self._postings: dict[str, list[int]] = {}
        for index, words in enumerate(self._words):
            for word in words:
                self._postings.setdefault(word, []).append(index)

    def search(self, query: str, topk: int) -> str:
        """Return the best documents, one per line. Ties are ordered by id."""
        scores: defaultdict[int, float] = defaultdict(float)
        for word in dict.fromkeys(split_words(query)):
            postings = self._postings.get(word, [])
            rarity = math.log(1 + (len(self._words) - len(postings) + 0.5) / (len(postings) + 0.5))
            for index in postings:
                count = self._words[index][word]
                norm = 1.2 * (0.25 + 0.75 * self._lengths[index] / self._mean)
                scores[index] += rarity * count * 2.2 / (count + norm)
        best = sorted(scores, key=lambda index: (-round(scores[index], 6), index))[:topk]
        hits = [self._documents[index] for index in best]
        lines = [f"Doc {i}(Title: {d['title']}) {d['text']}" for i, d in enumerate(hits, start=1)]
        return "\n".join(lines) or NO_RESULTS


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"[^\W_]+", text.lower())


@functools.cache
def get_search_agent(corpus: str, topk: int) -> Any:
    """Build an agent that searches a corpus; later calls return the same agent."""
    from pydantic_ai import Agent

    documents = Corpus(corpus)
    agent = Agent(system_prompt=SYSTEM)

    @agent.tool_plain
    async def search(query: str) -> str:
        """Searches a collection of documents and returns passages that fit a query."""
        return documents.search(query, topk)

    return agent


@functools.cache
def get_http_client() -> Any:
    """Return the HTTP client that all episodes share, since creating one takes 20 ms of CPU."""
    from openai import DefaultAsyncHttpxClient

    return DefaultAsyncHttpxClient()


async def ask(
    question: str,
    *,
    base_url: str,
    api_key: str,
    model: str,
    corpus: str,
    topk: int = 3,
    max_requests: int = 3,
) -> str:
    """Run the agent on a question; return its last message.

    Raises:
        pydantic_ai.exceptions.AgentRunError: The agent made too many requests or a malformed call.
    """
    from pydantic_ai import UsageLimits
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=base_url, api_key=api_key, http_client=get_http_client())
    result = await get_search_agent(corpus, topk).run(
        question,
        model=OpenAIChatModel(model, provider=provider),
        usage_limits=UsageLimits(request_limit=max_requests),
    )
    return str(result.output)


def extract_final_answer(text: str) -> str:
    """Return the content of the last `<answer>` tag, or "" if there is none."""
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return answers[-1].strip() if answers else ""


def normalize_answer(text: str) -> str:
    """Normalize an answer: drop case, punctuation, articles and repeated spaces."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


async def play(
    task: dict[str, Any], *, base_url: str, api_key: str, model: str, **settings: Any
) -> dict[str, Any]:
    """Run an episode; return reward 1 for an accepted answer, else 0.

    Errors of the model get reward 0: too many requests, calls that match no tool, a full context.
    Any other exception from the framework is an error of the episode.

    Args:
        task: Task record with `question` and `answers`.
        base_url: URL of the endpoint, ending in /v1.
        api_key: API key for the endpoint.
        model: Model name to send.
        settings: Additional arguments of `ask`, such as `corpus` and `topk`.
    """
    from pydantic_ai.exceptions import (
        ModelContextWindowExceededError,
        UnexpectedModelBehavior,
        UsageLimitExceeded,
    )

    try:
        response = await ask(
            task["question"], base_url=base_url, api_key=api_key, model=model, **settings
        )
    except (ModelContextWindowExceededError, UnexpectedModelBehavior, UsageLimitExceeded):
        response = ""
    answer = extract_final_answer(response)
    is_correct = bool(answer) and normalize_answer(answer) in map(normalize_answer, task["answers"])
    return {"reward": float(is_correct), "is_correct": is_correct, "final_answer": answer}


if __name__ == "__main__":
    print(
        asyncio.run(
            ask(
                sys.argv[2],
                base_url=os.environ["OPENAI_BASE_URL"],
                api_key=os.environ.get("OPENAI_API_KEY", "none"),
                model=os.environ.get("JAXRL_MODEL", "any"),
                corpus=sys.argv[1],
            )
        )
    )
