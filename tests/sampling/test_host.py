"""The host's side of the sampler: reports, lengths of chunks, and what a device waits for."""

import threading
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.envs.base import Outcome
from jaxrl.sampling import decode
from jaxrl.sampling.episodes import ReplySchedule
from jaxrl.sampling.trajectory import Sample, TokenSpan, to_trajectory
from jaxrl.utils.concurrency import ThreadPool
from tests.helpers import tiny_params
from tests.sampling.slow import SlowEnv
from tests.toys import SMALL, Player, toy_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")

STOPS = tuple("abcdefghijklmnop")
PARAMS = tiny_params(SMALL, seed=11)


@pytest.fixture(scope="module")
def player():
    return Player(SMALL, toy_tokenizer(), STOPS, num_rows=4, chunk_tokens=4)


def test_a_report_reaches_the_host_bit_for_bit():
    numbers = np.array([[-0.0, np.nan, 1e-45], [-1.5, np.inf, 3.0]], np.float32)
    report = decode.ChunkReport(
        token_ids=jnp.array([[5, 6, -1], [7, 8, 9]], jnp.int32),
        logprobs=jnp.array(numbers),
        entropies=jnp.array(-numbers),
        status=jnp.array([2, 0], jnp.int32),
        stop_state=jnp.array([3, 4], jnp.int32),
        recorded={},
    )
    sampler = SimpleNamespace(decode_chunk=lambda: (1, 2, report), _constrain_rows=lambda x: x)
    cache, state, packed = decode.Programs.decode_packed(sampler)
    assert (cache, state, packed.values.shape) == (1, 2, (2, 3 * 3 + 2))
    got = decode.unpack_report(decode.PackedReport(values=np.asarray(packed.values), recorded={}))
    np.testing.assert_array_equal(got.token_ids, report.token_ids)
    np.testing.assert_array_equal(got.logprobs.view(np.int32), numbers.view(np.int32))
    np.testing.assert_array_equal(got.entropies.view(np.int32), (-numbers).view(np.int32))
    assert (got.status.tolist(), got.stop_state.tolist()) == ([2, 0], [3, 4])


def test_a_trajectory_is_made_of_spans():
    episode = SimpleNamespace(task=None, opener="", turns=[], outcome=Outcome.ANSWERED)
    sample = Sample(episode=episode, sample_index=0, attempt=0, token_ids=[1, 2], prompt_length=2)
    sample.begin_first_turn()
    sample.append([3, 4], np.float32([-1, -2]), np.float32([0.5, 0.25]), 7)
    sample.append([], np.float32([]), np.float32([]), 7)
    sample.append_observation([5])
    sample.append([6, 7], np.float32([-3, -4]), np.float32([0.1, 0.2]), [8, 9])
    assert [type(one) for one in sample.sampled] == [TokenSpan, TokenSpan]
    got = to_trajectory(sample, {})
    assert got.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert got.loss_mask.tolist() == [False, False, True, True, False, True, True]
    assert got.rollout_logprobs.tolist() == [0, 0, -1, -2, 0, -3, -4]
    np.testing.assert_array_equal(got.rollout_entropies, np.float32([0, 0, 0.5, 0.25, 0, 0.1, 0.2]))
    assert got.policy_versions.tolist() == [-1, -1, 7, 7, -1, 8, 9]
    assert sample.num_sampled == 4


def test_a_span_goes_on_where_the_same_weights_sample_on():
    episode = SimpleNamespace(task=None, opener="", turns=[], outcome=Outcome.ANSWERED)
    sample = Sample(episode=episode, sample_index=0, attempt=0, token_ids=[1], prompt_length=1)
    sample.begin_first_turn()
    own = [5, 6]
    for number, versions in enumerate((3, 3, own, own, 4)):
        numbers = np.float32([number, number + 0.5])
        sample.append([7, 8], numbers, -numbers, versions)
    assert [(one.start, one.end) for one in sample.sampled] == [(1, 5), (5, 7), (7, 9), (9, 11)]
    got = to_trajectory(sample, {})
    assert got.policy_versions.tolist() == [-1, 3, 3, 3, 3, 5, 6, 5, 6, 4, 4]
    assert got.rollout_logprobs.tolist() == [0, 0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5]
    np.testing.assert_array_equal(got.rollout_entropies, -got.rollout_logprobs)


def slow(latency_s=0.0):
    """An observation and the end; each call takes a while."""
    return SlowEnv(STOPS, latency_s, least_s=latency_s, num_notes=1)


def play(player, env, questions, **settings):
    player.engine.set_weights(PARAMS)
    return player.play(env, questions, **settings)


def test_chunks_of_another_length_draw_the_same(player):
    wanted = play(player, slow(), ["where?", "when"], group_size=3)
    other = Player(SMALL, toy_tokenizer(), STOPS, num_rows=4, chunk_tokens=2)
    got = play(other, slow(), ["where?", "when"], group_size=3)
    assert [t.token_ids.tolist() for t in got] == [t.token_ids.tolist() for t in wanted]


def test_waits_are_counted_by_why(player):
    engine = player.engine
    engine.wait_s.clear()
    # A single episode waits alone, for each of its two calls.
    play(player, slow(0.1), ["where?"], schedule=ReplySchedule(lag_chunks=1))
    assert engine.wait_s.keys() <= {"tasks"}
    assert 0.2 <= engine.wait_s["tasks"] < 1.0
    engine.wait_s.clear()
    # Of twelve, others could be decoded while the first wait: replies are due too early.
    play(player, slow(0.1), ["where?"] * 4, group_size=3, schedule=ReplySchedule(lag_chunks=1))
    assert engine.wait_s["lag"] >= 0.1
    engine.wait_s.clear()
    play(player, slow(), ["where?"] * 4, group_size=3, schedule=ReplySchedule(lag_chunks=3))
    assert sum(engine.wait_s.values()) < 0.1


def test_threads_are_taken_again_and_end():
    threads, go = ThreadPool(), threading.Event()
    names = [threads.start(threading.get_ident).result() for _ in range(5)]
    hanging = threads.start(go.wait)
    failing = threads.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.result()
    time.sleep(0.05)
    alive = [one for one in threading.enumerate() if one.name == "env"]
    assert 2 <= len({*names, *(one.ident for one in alive)}) <= 3
    threads.close()
    left = [one for one in alive if one.is_alive()]
    assert len(left) == 1  # nobody waits for it
    assert not hanging.done()
    go.set()
    left[0].join(5)
    assert not left[0].is_alive()
