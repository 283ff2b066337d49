"""Reading only the live part of the cache changes nothing."""

import numpy as np
import pytest

from jaxrl.sampling.engine import Engine, Request, sample_keys
from jaxrl.sampling.stop_strings import StopAutomaton
from tests.helpers import NUM_TOKENS, TINY, tiny_params
from tests.toys import one_device_mesh

pytestmark = pytest.mark.usefixtures("quick_compilation")

BUDGET = 40


def sample(lengths_to_keep):
    """Two samples, after prompts of 50 and 3 tokens; and how many programs that compiled."""
    engine = Engine(
        TINY,
        one_device_mesh(),
        StopAutomaton([b"a"] * NUM_TOKENS, ["stop"]),
        num_tokens=NUM_TOKENS,
        eos_ids=(),
        num_slots=2,
        max_prompt_tokens=50,
        max_total_tokens=50 + BUDGET,
        chunk_tokens=8,
        prompts_per_prefill=2,
    )
    engine.length_sizes = engine.length_sizes[lengths_to_keep]
    engine.set_weights(tiny_params())
    two = np.arange(2, dtype=np.int32)
    keys = sample_keys(0, 0, 0, two, two, np.zeros_like(two))
    engine.submit(
        [
            Request(prompt_ids=tuple(range(1, length + 1)), sample_key=key, budget=BUDGET)
            for length, key in zip((50, 3), keys, strict=True)
        ]
    )
    parts = {0: [], 1: []}
    while not engine.is_idle:
        for event in engine.step():
            parts[event.request].append(event)
            if event.status:
                engine.finish(event.request)
    samples = [
        (
            np.concatenate([event.token_ids for event in parts[number]]),
            np.concatenate([event.logprobs for event in parts[number]]),
        )
        for number in parts
    ]
    return samples, engine.num_compilations


def test_live_lengths_against_the_whole_cache():
    live, num_live = sample(slice(None))  # 64 at first, then 90
    whole, num_whole = sample(slice(-1, None))
    assert num_live == num_whole + 1
    for (tokens, logprobs), (wanted_tokens, wanted_logprobs) in zip(live, whole, strict=True):
        assert len(tokens) == BUDGET
        np.testing.assert_array_equal(tokens, wanted_tokens)
        np.testing.assert_allclose(logprobs, wanted_logprobs, atol=5e-5, rtol=0)
