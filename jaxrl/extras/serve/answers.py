"""Answers while they grow, and those that are kept for clients that ask again.

All of it lives on the event loop; the worker tells its pieces from its own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np

from jaxrl.extras.serve.engine import Way
from jaxrl.extras.serve.fields import Fields, RefusedError, TooLongError
from jaxrl.extras.serve.worker import (
    FAILED,
    LATE,
    LEFT,
    LENGTH,
    STOP,
    BusyError,
    EndingError,
    Job,
    Piece,
    Worker,
)

MAX_STOPS, MAX_CHOICES = 16, 128
LEAST_TEMPERATURE = 1e-3
"""Least temperature above 0: logits divided by less might overflow."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Settings of an answer, whatever the dialect.

    Attributes:
        prompt_ids: what it goes on from.
        count: samples of it.
        way: of its draws.
        seed: on which these depend; None: nobody knows.
        budget: tokens of each sample.
        stop_ids: end one.
        stops: likewise, strings.
    """

    prompt_ids: tuple[int, ...]
    count: int
    way: Way
    seed: int | None
    budget: int
    stop_ids: frozenset[int]
    stops: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of what is asked, and of answers where a request says nothing.

    Attributes:
        max_total_tokens: of prompt and answer.
        num_tokens: ids that the tokenizer knows.
        stops: strings that end an answer where its request names none.
    """

    max_total_tokens: int
    num_tokens: int
    stops: tuple[str, ...] = ()

    def check(self, values: Sequence[Any]) -> None:
        """Refuses a list each item of which takes a token or more, before it is gone through.

        Raises:
            RefusedError: it cannot fit.
        """
        if len(values) >= self.max_total_tokens:
            raise TooLongError(len(values), self.max_total_tokens)


def read_question(
    fields: Fields, prompt_ids: Sequence[int], limits: Limits, budget: int | None, count: int = 1
) -> Question:
    """Reads how an answer is drawn, by the names that all dialects share.

    Args:
        fields: of the body, or the part of it that says how to sample.
        prompt_ids: what the answer goes on from.
        limits: of the server.
        budget: tokens that were asked for; None: as many as there is room for.
        count: samples.

    Raises:
        RefusedError: a field is wrong, or the prompt leaves no room.
    """
    room = limits.max_total_tokens - len(prompt_ids)
    if room < 1:
        raise TooLongError(len(prompt_ids), limits.max_total_tokens)
    temperature = fields.number("temperature", 1.0, 0.0, 100.0)
    if 0.0 < temperature < LEAST_TEMPERATURE:
        raise fields.refuse(
            "temperature", f"0 for the most likely, or {LEAST_TEMPERATURE} and more"
        )
    seed = fields.whole("seed", 0, -(2**63)) if "seed" in fields.values else None
    names_stops = "stop" in fields.values
    return Question(
        prompt_ids=tuple(prompt_ids),
        count=count,
        way=Way(temperature, max(fields.number("top_p", 1.0, 0.0, 1.0), 1e-6)),
        seed=seed,
        budget=room if budget is None else min(budget, room),
        stop_ids=frozenset(
            fields.ids("stop_token_ids", limits.num_tokens, limits.max_total_tokens, default=())
        ),
        stops=tuple(fields.texts("stop", MAX_STOPS)) if names_stops else limits.stops,
    )


class Sample:
    """One sample of an answer: its pieces so far."""

    def __init__(self) -> None:
        """Begins without a piece."""
        self.pieces: list[Piece] = []
        self.job: Job | None = None
        self._changed = asyncio.Event()

    @property
    def end(self) -> str:
        """Reason why it has ended; "" while it goes on."""
        return self.pieces[-1].end if self.pieces else ""

    @property
    def token_ids(self) -> list[int]:
        """All that was sampled."""
        return [id for piece in self.pieces for id in piece.token_ids]

    def add(self, piece: Piece) -> None:
        """Adds what the worker tells."""
        self.pieces.append(piece)
        self._changed.set()

    async def follow(self) -> AsyncIterator[Piece]:
        """Pieces as they come, up to the last one.

        Raises:
            RefusedError: it was not finished.
        """
        count = 0
        while not (count and self.pieces[count - 1].end):
            while count == len(self.pieces):
                self._changed.clear()
                await self._changed.wait()
            piece = self.pieces[count]
            count += 1
            if piece.end not in ("", STOP, LENGTH):
                raise _unfinished(piece)
            yield piece


def _unfinished(piece: Piece) -> RefusedError:
    if piece.end == LATE:
        return RefusedError(504, "the answer took longer than it may; raise --deadline_s.")
    if piece.end == LEFT:
        return RefusedError(503, "the answer was broken off: the server is ending.")
    assert piece.end == FAILED
    return RefusedError(500, piece.why)


class Answer:
    """All samples of a question, for as many clients as wait for them."""

    def __init__(
        self, question: Question, shown: Any, session: str = "", keys: Sequence[np.ndarray] = ()
    ):
        """Chooses the draws; nothing is asked yet.

        Args:
            question: to be answered.
            shown: what the dialect knows of it.
            session: whose it is.
            keys: uint32 [2] of each sample's draws; without any, they follow from the seed.
        """
        self.question, self.shown, self.session = question, shown, session
        self.keys = keys or [sample_key(question.seed, index) for index in range(question.count)]
        self.is_lost = False  # who asked was not there to read it
        self.samples: list[Sample] = []
        self.created = int(time.time())
        self.num_readers = 0
        self.names: set[str] = set()  # under which it is kept

    @property
    def id(self) -> str:
        """A name, the same for all who ask again."""
        return hashlib.sha256(b"".join(key.tobytes() for key in self.keys)).hexdigest()[:24]


def sample_key(seed: int | None, index: int) -> np.ndarray:
    """The key uint32 [2] of a sample's draws."""
    data = os.urandom(8) if seed is None else f"{seed},{index}".encode()
    return np.frombuffer(hashlib.sha256(data).digest()[:8], np.uint32).copy()


class Answers:
    """Asks the worker, and keeps answers for a while."""

    def __init__(self, worker: Worker, *, deadline_s: float, max_kept: int = 512):
        """Keeps none yet.

        Args:
            worker: answers.
            deadline_s: seconds from a question to the end of its answer.
            max_kept: answers that a client may ask for again, beside those that are read.
        """
        self._worker, self._deadline_s, self._max_kept = worker, deadline_s, max_kept
        self._kept: OrderedDict[str, tuple[str, Answer]] = OrderedDict()

    def find(self, name: str, body: str) -> Answer | None:
        """The answer that is kept under a name.

        Args:
            name: of the request.
            body: its digest.

        Raises:
            RefusedError: it was given to another request.
        """
        if name not in self._kept:
            return None
        before, answer = self._kept[name]
        if before != body:
            raise RefusedError(
                422,
                "the Idempotency-Key was used for another body; expected a new key for it.",
                code="idempotency_key_reused",
            )
        self._kept.move_to_end(name)
        return answer

    def keep(self, name: str, body: str, answer: Answer) -> None:
        """Keeps an answer under a name."""
        self._kept[name] = body, answer
        self._kept.move_to_end(name)
        answer.names.add(name)
        if (count := len(self._kept) - self._max_kept) > 0:
            old = (one for one, (_, kept) in self._kept.items() if not kept.num_readers)
            for one in [*islice(old, count)]:
                del self._kept[one]

    @contextlib.contextmanager
    def reading(self, answer: Answer) -> Any:
        """Has what is left of an answer sampled while somebody reads it.

        The last reader to leave ends it.

        Raises:
            RefusedError: too many wait, or the server ends.
        """
        self._ask(answer)
        answer.num_readers += 1
        try:
            yield answer
        finally:
            answer.num_readers -= 1
            if not answer.num_readers:
                for name in answer.names & self._kept.keys():  # it may have waited for long
                    self._kept.move_to_end(name)
                for sample in answer.samples:
                    if not sample.end and sample.job is not None:
                        self._worker.cancel(sample.job)

    def _ask(self, answer: Answer) -> None:
        loop = asyncio.get_running_loop()
        question = answer.question
        old = answer.samples or [Sample() for _ in answer.keys]
        # What was broken off is drawn again from the same keys.
        is_new = [s.job is None or s.job.is_left or s.end in (LATE, LEFT, FAILED) for s in old]
        samples = [Sample() if new else s for s, new in zip(old, is_new, strict=True)]
        jobs = []
        for sample, key, new in zip(samples, answer.keys, is_new, strict=True):
            if new:
                sample.job = Job(
                    prompt_ids=question.prompt_ids,
                    sample_key=key,
                    way=question.way,
                    budget=question.budget,
                    stop_ids=question.stop_ids,
                    stops=tuple(stop.encode() for stop in question.stops),
                    deadline=time.monotonic() + self._deadline_s,
                    tell=_teller(loop, sample),
                    session=answer.session,
                )
                jobs.append(sample.job)
        if jobs:
            try:
                self._worker.submit(jobs)
            except ValueError as error:
                raise RefusedError(400, str(error), param="n") from error
            except BusyError as error:
                raise RefusedError(429, str(error), headers={"Retry-After": "1"}) from error
            except EndingError as error:
                raise RefusedError(503, str(error)) from error
        answer.samples = samples


def _teller(loop: asyncio.AbstractEventLoop, sample: Sample) -> Any:
    def tell(piece: Piece) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(sample.add, piece)

    return tell


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of a finished sample as one."""
    return dataclasses.replace(
        pieces[-1],
        token_ids=tuple(chain.from_iterable(piece.token_ids for piece in pieces)),
        logprobs=tuple(chain.from_iterable(piece.logprobs for piece in pieces)),
        entropies=tuple(chain.from_iterable(piece.entropies for piece in pieces)),
    )
