"""A served hybrid: sessions of several turns, stops and cancelled requests."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from jaxrl.extras.serve.engine import SamplingParams
from jaxrl.extras.serve.worker import CANCELLED, LENGTH, STOP
from tests.extras.delta_net.models import TINY_HYBRID, random_params
from tests.extras.serve.served import TOKENIZER, make_engine, serving
from tests.extras.serve.test_engine import PROMPT, WorkerClient, finish, key

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = dataclasses.replace(TINY_HYBRID, vocab_size=TOKENIZER.num_tokens + 5)
SAMPLED = {"params": SamplingParams(1.0, 1.0)}
NUM_SESSIONS = 6  # on four rows


@pytest.fixture(scope="module")
def engine(quick_compilation):
    return make_engine(random_params(CONFIG, seed=0), CONFIG)


def list_stops(session):
    """Return the stops of a session: none, ids within a chunk, or strings that cut a token."""
    kinds = [{}, {"stop_ids": frozenset(range(0, 3000, 3))}, {"stops": ("e", "ing", " t")}]
    return kinds[session % 3]


def play(client):
    """Play three turns of each session; return the requests and their answers."""
    prompts, played = [[*PROMPT, 40 + n] for n in range(NUM_SESSIONS)], []
    for turn in range(3):
        requests = [
            (tuple(prompt), {"sample_key": key(turn), **SAMPLED, **list_stops(n)})
            for n, prompt in enumerate(prompts)
        ]
        jobs, outlets = zip(
            *(client.job(p, 7, **settings) for p, settings in requests), strict=True
        )
        # One more runs beside them, and ends early.
        cancelled, outlet = client.job([*PROMPT, 70 + turn], 200)
        client.worker.submit([cancelled, *jobs])
        outlet.get(timeout=60)
        client.worker.cancel(cancelled)
        for request, prompt, chunks in zip(requests, prompts, outlets, strict=True):
            ids, chunk = finish(chunks)
            played.append((request, ids, chunk))
            prompt += [*ids, 60 + turn]
        assert finish(outlet)[1].finish_reason == CANCELLED
    return played


@pytest.mark.parametrize("overlaps", [False, True])
def test_sessions_equal_requests_to_a_new_engine(engine, monkeypatch, overlaps):
    monkeypatch.setattr(engine, "overlaps", overlaps)
    with WorkerClient(engine) as client:
        played = play(client)
        num_cached = [chunk.num_cached for _, _, chunk in played]
    assert {chunk.finish_reason for *_, chunk in played} == {STOP, LENGTH}
    if not overlaps:  # some rows have the state after their last token, and continue from it
        assert sum(map(bool, num_cached[NUM_SESSIONS:])) >= 2
    for (prompt, settings), ids, chunk in played:
        with WorkerClient(engine) as client:  # nothing is cached
            wanted, other = client.ask(prompt, 7, **settings)
        assert (ids, chunk.finish_reason, chunk.text_bytes) == (
            wanted, other.finish_reason, other.text_bytes,
        )  # fmt: skip
        np.testing.assert_allclose(chunk.logprobs, other.logprobs, atol=1e-4)


def test_a_conversation_over_http(engine):
    prompts = [list(PROMPT)]
    with serving(engine) as (_, client):
        for _ in range(3):
            ids = client.generate(prompts[-1], temperature=0.0)["token_ids"]
            prompts.append([*prompts[-1], *ids, 40, 41])
        reused = client.metrics()["jaxrl_prompt_tokens_reused_total"]
        assert client.chat("hello", temperature=0.0)["choices"][0]["message"]["content"]
    assert reused > 0
    for prompt, longer in pairwise(prompts):
        with serving(engine) as (_, client):
            ids = client.generate(prompt, temperature=0.0)["token_ids"]
        assert ids == longer[len(prompt) : -2]


def test_few_states_do_not_block_requests(engine):
    """Cached rows, which hold states, are dropped for new requests."""
    with WorkerClient(engine) as client:
        for number in range(3 * engine.num_states):
            _, chunk = client.ask([*PROMPT, 100 + number], 6)
            assert chunk.finish_reason in (LENGTH, STOP)
        assert 0 < client.worker.num_cached_rows <= engine.num_states
