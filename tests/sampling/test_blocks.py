"""Block allocation of the KV cache, and preemption when no page is free."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.models.attention.reference import XLA
from jaxrl.sampling.blocks import PagePool, count_pages
from jaxrl.sampling.engine import Request
from jaxrl.sampling.sample_keys import derive_sample_keys
from tests.helpers import dense_table, tiny_params
from tests.toys import SMALL, Player, toy_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")

TOKENIZER = toy_tokenizer()
PARAMS = tiny_params(SMALL)
PAGE = 4
LONGEST = 48

table_of = jax.jit(dense_table, static_argnums=1, static_argnames="num_tokens")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 9))))
def test_page_pool_agrees_with_sets(operations):
    pool, rows = PagePool(12), []
    for name, number in operations:
        if name == "allocate" and number <= pool.num_free:
            used = {page for row in rows for page in row}
            taken = pool.allocate(number)
            # The lowest free pages.
            assert taken == [page for page in range(12) if page not in used][:number]
            rows.append(taken)
        elif rows and name == "share":
            rows.append(list(rows[number % len(rows)]))
            pool.retain(rows[-1])
        elif rows and name == "free":
            pool.free(rows.pop(number % len(rows)))
        used = [page for row in rows for page in row]
        assert pool.num_free == 12 - len(set(used)) >= 12 - pool.peak_used
        assert all(pool._ref_counts[page] == used.count(page) for page in range(12))
    for row in rows:
        pool.free(row)
    assert pool.num_free == 12


def test_page_counts_by_hand():
    assert [count_pages(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


@functools.cache
def build_engine(num_pages, scan_layers=False):
    """Build an engine with pages of four tokens; `num_pages=0` is enough for all rows."""
    kernels = dataclasses.replace(XLA, page_tokens=PAGE)
    engine = Player(
        SMALL, TOKENIZER, ("a", "e", "t"), num_rows=20, num_pages=num_pages, chunk_tokens=4,
        max_total_tokens=LONGEST, kernels=kernels, scan_layers=scan_layers,
    ).engine  # fmt: skip
    engine.row_sizes = engine.row_sizes[-1:]  # other shapes round differently
    return engine


def check_pages(engine):
    """Check that only full pages of a prompt are shared, and that reference counts are right."""
    users = {}
    for row in engine._rows.values():
        assert (row.saved is None) or not row.pages
        num_full = row.prefix.num_tokens // PAGE
        for index, page in enumerate(row.pages):
            users.setdefault(page, []).append((row, index < num_full))
    [shard] = engine._shards
    cached = [page for prefix in shard.prefixes.values() for page in prefix.cached]
    pool = shard.pool
    for page, page_users in users.items():
        assert pool._ref_counts[page] == len(page_users) + cached.count(page)
        if len(page_users) > 1:
            assert all(is_full for _, is_full in page_users)
            assert len({row.prefix.prompt for row, _ in page_users}) == 1
    assert pool.num_free == engine.num_pages - len({*users, *cached})


def play(engine, requests, *, ahead, lag, turns=3):
    """Return ids and logprobs of each request, with a short observation between its turns."""
    engine.set_weights(PARAMS)
    numbers = engine.submit(requests)
    rows = {number: (list(r.prompt_ids), []) for number, r in zip(numbers, requests, strict=True)}
    num_turns, waiting = dict.fromkeys(numbers, 0), []
    while not engine.is_idle:
        due = [reply for reply in waiting if reply[0] <= engine.counts.chunks or engine.is_stalled]
        waiting = [reply for reply in waiting if reply not in due]
        engine.resume([entry for _, entry in due])
        for event in engine.step(ahead=ahead):
            ids, logprobs = rows[event.request]
            ids.extend(event.token_ids.tolist())
            logprobs.extend(event.logprobs.tolist())
            if event.status == 0:
                continue
            num_turns[event.request] += 1
            observed = [7, 8, 9, 10, 11][: event.request % 6]
            room = LONGEST - len(ids) - len(observed)
            if num_turns[event.request] == turns or room < 1:
                engine.finish(event.request)
                continue
            ids.extend(observed)
            waiting.append((event.chunk + lag, (event.request, observed, min(room, 12))))
        check_pages(engine)
    [shard] = engine._shards
    assert shard.pool.num_free == engine.num_pages
    assert not shard.prefixes
    return [rows[number] for number in numbers]


def make_requests(seed, num_prompts=12, group_size=2):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 21, num_prompts)
    prompts = [tuple(rng.integers(0, 250, length).tolist()) for length in lengths]
    count = np.arange(num_prompts * group_size)
    keys = derive_sample_keys(seed, 0, 0, count // group_size, count % group_size, 0 * count)
    return [
        Request(prompt_ids=prompts[n // group_size], sample_key=key, budget=16)
        for n, key in zip(count, keys, strict=True)
    ]


@pytest.mark.parametrize(("ahead", "lag"), [(0, 1), (1, 5)])
def test_a_tenth_of_the_pages_gives_the_same_samples_bit_for_bit(ahead, lag):
    plenty, scarce = build_engine(0), build_engine(12)
    requests = make_requests(seed=lag)
    expected = play(plenty, requests, ahead=ahead, lag=lag)
    assert plenty.peak_pages >= 120  # a trajectory may fill 12
    before = dataclasses.replace(scarce.counts)
    assert play(scarce, requests, ahead=ahead, lag=lag) == expected
    assert scarce.counts.preemptions > before.preemptions
    assert scarce.counts.swapped > before.swapped
    assert scarce.peak_pages == 12


def test_scanned_layers_sample_the_same_as_unrolled_layers():
    requests = make_requests(seed=3)
    unrolled, scanned = (
        play(build_engine(12, scan_layers), requests, ahead=1, lag=2)
        for scan_layers in (False, True)
    )
    assert build_engine(12, True).counts.preemptions > 0
    for (ids, logprobs), (expected_ids, expected_logprobs) in zip(scanned, unrolled, strict=True):
        assert ids == expected_ids
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=5e-5, rtol=0)


def test_a_prompt_is_read_once_for_more_samples_than_rows():
    engine = build_engine(0)
    before = engine.counts.prefilled_prompt
    requests = make_requests(seed=5, num_prompts=2, group_size=25)
    play(engine, requests, ahead=1, lag=1, turns=1)
    lengths = [len(prompt) - 1 for prompt in dict.fromkeys(r.prompt_ids for r in requests)]
    assert engine.counts.prefilled_prompt - before == sum(lengths)


def test_greedy_tokens_are_those_of_the_full_pass():
    engine = build_engine(0)
    engine.set_weights(PARAMS)
    prompts = [(1, 2, 3), (9,), tuple(range(30, 47))]
    keys = np.zeros((3, 2), np.uint32)
    requests = [
        Request(prompt_ids=p, sample_key=k, budget=12) for p, k in zip(prompts, keys, strict=True)
    ]
    numbers = engine.submit(requests, temperature=0.0)
    rows = {number: list(prompt) for number, prompt in zip(numbers, prompts, strict=True)}
    while not engine.is_idle:
        for event in engine.step():
            rows[event.request].extend(event.token_ids.tolist())
            if event.status:
                engine.finish(event.request)
    for prompt, ids in zip(prompts, rows.values(), strict=True):
        padded = np.zeros(LONGEST, np.int32)
        padded[: len(ids)] = ids
        table = table_of(PARAMS, SMALL, padded, num_tokens=TOKENIZER.num_tokens)[: len(ids)]
        best = np.asarray(table).argmax(axis=1)[len(prompt) - 1 : -1]
        assert ids[len(prompt) :] == best.tolist()
