"""The books of the cache: what belongs to whom, and what happens when nothing is left."""

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


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 9))))
def test_a_pool_against_sets(operations):
    pool, rows = PagePool(12), []
    for name, number in operations:
        if name == "allocate" and number <= pool.num_free:
            used = {page for row in rows for page in row}
            taken = pool.allocate(number)
            # The lowest pages that nobody has.
            assert taken == [page for page in range(12) if page not in used][:number]
            rows.append(taken)
        elif rows and name == "share":
            rows.append(list(rows[number % len(rows)]))
            pool.retain(rows[-1])
        elif rows and name == "free":
            pool.free(rows.pop(number % len(rows)))
        used = [page for row in rows for page in row]
        assert pool.num_free == 12 - len(set(used)) >= 12 - pool.peak_used
        assert all(pool.ref_count(page) == used.count(page) for page in range(12))
    for row in rows:
        pool.free(row)
    assert pool.num_free == 12


def test_pages_for_by_hand():
    assert [count_pages(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


@functools.cache
def engine(num_pages, num_rows=6, scan_layers=False):
    """Rows over so many pages of four tokens; 0: enough for all."""
    kernels = dataclasses.replace(XLA, page_tokens=PAGE)
    made = Player(
        SMALL, TOKENIZER, ("a", "e", "t"), num_rows=num_rows, num_pages=num_pages, chunk_tokens=4,
        max_prompt_tokens=20, max_total_tokens=LONGEST, kernels=kernels, scan_layers=scan_layers,
    ).engine  # fmt: skip
    made.row_sizes = made.row_sizes[-1:]  # other shapes round otherwise
    return made


def check_books(engine):
    """A page is of one row, or full of a prompt that its rows share; as many users as rows."""
    users = {}
    for row in engine._rows.values():
        assert (row.saved is None) or not row.pages
        num_full = row.prefix.num_tokens // PAGE
        for index, page in enumerate(row.pages):
            users.setdefault(page, []).append((row, index < num_full))
    [shard] = engine._shards
    kept = [page for prefix in shard.prefixes.values() for page in prefix.cached]
    pool = shard.pool
    for page, of_page in users.items():
        assert pool.ref_count(page) == len(of_page) + kept.count(page)
        if len(of_page) > 1:
            assert all(is_full for _, is_full in of_page)
            assert len({row.prefix.prompt for row, _ in of_page}) == 1
    assert pool.num_free == engine.num_pages - len({*users, *kept})


def play(engine, requests, *, ahead, lag, turns=3):
    """Ids and logprobs of each request, with an observation of a few tokens between its turns."""
    engine.set_weights(PARAMS)
    numbers = engine.submit(requests)
    rows = {number: (list(r.prompt_ids), []) for number, r in zip(numbers, requests, strict=True)}
    num_turns, waiting = dict.fromkeys(numbers, 0), []
    while not engine.is_idle:
        due = [one for one in waiting if one[0] <= engine.counts.chunks or engine.is_stalled]
        waiting = [one for one in waiting if one not in due]
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
        check_books(engine)
    [shard] = engine._shards
    assert shard.pool.num_free == engine.num_pages
    assert not shard.prefixes
    return [rows[number] for number in numbers]


def make_requests(seed, num_prompts=6, group_size=3):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 21, num_prompts)
    prompts = [tuple(rng.integers(0, 250, length).tolist()) for length in lengths]
    count = np.arange(num_prompts * group_size)
    keys = derive_sample_keys(seed, 0, 0, count // group_size, count % group_size, 0 * count)
    return [
        Request(prompt_ids=prompts[n // group_size], sample_key=key, budget=16)
        for n, key in zip(count, keys, strict=True)
    ]


@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize(
    ("ahead", "lag"), [(0, 1), pytest.param(1, 2, marks=pytest.mark.slow(instead="::[0]")), (1, 5)]
)
def test_a_tenth_of_the_pages_gives_the_same_samples_bit_for_bit(ahead, lag, scan_layers):
    plenty, scarce = (engine(pages, num_rows=20, scan_layers=scan_layers) for pages in (0, 12))
    requests = make_requests(seed=lag, num_prompts=12, group_size=2)
    wanted = play(plenty, requests, ahead=ahead, lag=lag)
    assert plenty.peak_pages >= 120  # a trajectory may fill 12
    before = dataclasses.replace(scarce.counts)
    assert play(scarce, requests, ahead=ahead, lag=lag) == wanted
    assert scarce.counts.preemptions > before.preemptions
    assert scarce.counts.swapped > before.swapped
    assert scarce.peak_pages == 12
    # And once more.
    assert play(scarce, requests, ahead=ahead, lag=lag) == wanted


def test_less_than_a_trajectory_is_refused_at_the_start():
    with pytest.raises(ValueError, match=r"cache of 11 pages of 4 tokens .* fills 12; raise conf"):
        engine(11)


def test_a_loop_over_layers_samples_what_layers_one_by_one_do():
    requests = make_requests(seed=3)
    apart, stacked = (
        play(engine(12, scan_layers=scan), requests, ahead=1, lag=2) for scan in (False, True)
    )
    for (ids, logprobs), (wanted_ids, wanted_logprobs) in zip(stacked, apart, strict=True):
        assert ids == wanted_ids
        np.testing.assert_allclose(logprobs, wanted_logprobs, atol=5e-5, rtol=0)


def test_a_prompt_is_read_once_however_late_its_samples_come():
    one = engine(0)
    before = one.counts.prefilled_prompt
    requests = make_requests(seed=5, num_prompts=3, group_size=17)
    play(one, requests, ahead=1, lag=1, turns=1)
    lengths = [len(prompt) - 1 for prompt in dict.fromkeys(r.prompt_ids for r in requests)]
    assert one.counts.prefilled_prompt - before == sum(lengths)


def test_greedy_tokens_are_those_of_the_full_pass():
    one = engine(0)
    one.set_weights(PARAMS)
    prompts = [(1, 2, 3), (9,), tuple(range(30, 47))]
    keys = np.zeros((3, 2), np.uint32)
    requests = [
        Request(prompt_ids=p, sample_key=k, budget=12) for p, k in zip(prompts, keys, strict=True)
    ]
    numbers = one.submit(requests, temperature=0.0)
    rows = {number: list(prompt) for number, prompt in zip(numbers, prompts, strict=True)}
    while not one.is_idle:
        for event in one.step():
            rows[event.request].extend(event.token_ids.tolist())
            if event.status:
                one.finish(event.request)
    for prompt, ids in zip(prompts, rows.values(), strict=True):
        padded = np.zeros(LONGEST, np.int32)
        padded[: len(ids)] = ids
        table = table_of(PARAMS, SMALL, padded, num_tokens=TOKENIZER.num_tokens)[: len(ids)]
        best = np.asarray(table).argmax(axis=1)[len(prompt) - 1 : -1]
        assert ids[len(prompt) :] == best.tolist()
