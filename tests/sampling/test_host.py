"""The host side of the sampler: reports of chunks, trajectories, and threads."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from jaxrl.envs.base import Outcome
from jaxrl.sampling import decode
from jaxrl.sampling.trajectory import Sample, to_trajectory


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
    actual = decode.unpack_report(
        decode.PackedReport(values=np.asarray(packed.values), recorded={})
    )
    np.testing.assert_array_equal(actual.token_ids, report.token_ids)
    np.testing.assert_array_equal(actual.logprobs.view(np.int32), numbers.view(np.int32))
    np.testing.assert_array_equal(actual.entropies.view(np.int32), (-numbers).view(np.int32))
    assert (actual.status.tolist(), actual.stop_state.tolist()) == ([2, 0], [3, 4])


def test_a_trajectory_is_made_of_spans_of_one_policy_version():
    episode = SimpleNamespace(task=None, opener="", turns=[], outcome=Outcome.ANSWERED)
    sample = Sample(episode=episode, sample_index=0, attempt=0, token_ids=[1], prompt_length=1)
    sample.begin_first_turn()

    def append(first_number, versions):
        numbers = np.float32([first_number, first_number + 0.5])
        sample.append([7, 8], numbers, -numbers, versions)

    append(1, 3)
    append(2, 3)  # the same weights: the span grows
    sample.append([], np.float32([]), np.float32([]), 3)
    append(3, [5, 6])
    sample.append_observation([9])
    append(4, 4)
    assert [(span.start, span.end) for span in sample.sampled] == [(1, 5), (5, 7), (8, 10)]
    actual = to_trajectory(sample, {})
    assert actual.token_ids.tolist() == [1, 7, 8, 7, 8, 7, 8, 9, 7, 8]
    assert actual.loss_mask.tolist() == [False, *[True] * 6, False, True, True]
    assert actual.policy_versions.tolist() == [-1, 3, 3, 3, 3, 5, 6, -1, 4, 4]
    assert actual.rollout_logprobs.tolist() == [0, 1, 1.5, 2, 2.5, 3, 3.5, 0, 4, 4.5]
    np.testing.assert_array_equal(actual.rollout_entropies, -actual.rollout_logprobs)
    assert sample.num_sampled == 8
