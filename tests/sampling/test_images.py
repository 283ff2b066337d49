"""The engine with images in prompts and observations, compared with the full pass."""

import dataclasses
import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.extras.vision.processor import Image
from jaxrl.sampling import decode
from jaxrl.sampling.engine import Engine, Request
from jaxrl.sampling.sample_keys import derive_sample_keys
from jaxrl.sampling.stop_strings import StopAutomaton
from tests.toys import one_device_mesh
from tests.vision import golden, logits_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

IMAGE, VIDEO, NUM_TOKENS = 90, 91, 96
KEY = np.zeros(2, np.uint32)
TURN = 5  # tokens sampled before an observation


def build_engine(name="qwen2_5_vl", **settings):
    """Build an engine with few pages, so that requests are preempted."""
    sizes = {"num_rows": 4, "num_pages": 8, "max_total_tokens": 96}
    return Engine(
        golden(name)[0],
        one_device_mesh(),
        StopAutomaton([bytes([i]) for i in range(NUM_TOKENS)], ()),
        num_tokens=NUM_TOKENS,
        eos_ids=(),
        chunk_tokens=4,
        **{**sizes, "max_units": 35, **settings},
    )


shared_engine = cache(build_engine)


def play(engine, params, requests, observations=()):
    """Return the ids of each request, a mask of sampled ids, and their logprobs."""
    engine.set_weights(params)
    numbers = engine.submit(requests)
    ids = [list(request.prompt_ids) for request in requests]
    mask = [[False] * len(prompt) for prompt in ids]
    logprobs = [[] for _ in ids]
    waiting = dict(zip(numbers, observations, strict=False))
    while not engine.is_idle:
        for event in engine.step():
            index = numbers.index(event.request)
            ids[index] += event.token_ids.tolist()
            mask[index] += [True] * len(event.token_ids)
            logprobs[index] += event.logprobs.tolist()
            if event.status == decode.RUNNING:
                continue
            if (observation := waiting.pop(event.request, None)) is None:
                engine.finish(event.request)
                continue
            tokens, images = observation
            engine.resume([(event.request, tokens, TURN)], {event.request: images})
            ids[index] += tokens
            mask[index] += [False] * len(tokens)
    return [tuple(map(np.array, row)) for row in zip(ids, mask, logprobs, strict=True)]


def full_pass_logprobs(config, params, samples, images):
    """Return log-probabilities `[B, T, V]` of the results of `play`."""
    longest = max(len(ids) for ids, _, _ in samples)
    rows = [np.pad(ids, (0, longest - len(ids))) for ids, _, _ in samples]
    logits = jax.jit(partial(logits_of, config, rows=rows, images_of_rows=images))(params)
    return np.asarray(jax.nn.log_softmax(logits))


def assert_logprobs_agree(samples, scored):
    for (ids, mask, logprobs), row in zip(samples, scored, strict=True):
        at = np.flatnonzero(mask)
        np.testing.assert_allclose(logprobs, row[at - 1, ids[at]], atol=1e-4, rtol=0)


def random_image(config, grid, seed):
    """Return an image, or a video with frames 0.7 seconds apart."""
    size = (math.prod(grid), config.tower.num_values_per_patch)
    patches = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    times = tuple(0.7 * i for i in range(grid[0])) if grid[0] > 1 else ()
    return Image(patches=patches, grid=grid, times=times)


@pytest.mark.parametrize(
    "name", ["qwen2_5_vl", pytest.param("qwen3_5_vl", marks=pytest.mark.minutes)]
)
def test_images_are_read_as_in_the_full_pass(name):
    config, params, expected, images = golden(name)
    prompt = tuple(map(int, expected["token_ids"][0]))
    blank = tuple(
        dataclasses.replace(image, patches=np.zeros_like(image.patches)) for image in images
    )
    keys = derive_sample_keys(0, 0, 0, np.zeros(5, int), np.arange(5), np.zeros(5, int))
    attachments = [tuple(images)] * 3 + [blank, ()]
    prompts = [prompt] * 4 + [prompt[:3]]
    requests = [
        Request(prompt_ids=ids, sample_key=key, budget=TURN, attachments=attached)
        for ids, key, attached in zip(prompts, keys, attachments, strict=True)
    ]
    with_image = ([40, 92, *[IMAGE] * 6, 93, 41], (random_image(config, (1, 6, 4), 0),))
    between = [44] if config.tower.has_split_videos else []
    frames = [*[VIDEO] * 4, *between, *[VIDEO] * 4]
    with_video = ([40, 92, *frames, 93, 41], (random_image(config, (2, 4, 4), 2),))
    words = ([42, 43], ())
    observations = [with_image, words, with_video, words, with_image]
    engine = shared_engine(name)
    before = dataclasses.replace(engine.counts)
    samples = play(engine, params, requests, observations)
    # A prompt is read once for its group; the same ids with other images are another prompt.
    num_read = engine.counts.prefilled_prompt - before.prefilled_prompt
    assert num_read == 2 * (len(prompt) - 1) + 2
    assert engine.counts.preemptions > before.preemptions

    all_images = [
        (*first, *more) for first, (_, more) in zip(attachments, observations, strict=True)
    ]
    scored = full_pass_logprobs(config, params, samples, all_images)
    assert_logprobs_agree(samples, scored)
    for ids, mask, _ in samples:
        assert mask.sum() == 2 * TURN
        assert not np.isin(ids[mask], [IMAGE, config.tower.video_id]).any()
    assert abs(scored[0, len(prompt) - 1] - scored[3, len(prompt) - 1]).max() > 0.1


@pytest.mark.minutes
def test_a_prompt_read_in_pieces_has_the_logprobs_of_the_full_pass(monkeypatch):
    """The cuts lie within images, which Qwen3-VL adds to the states of several layers.

    The last is the second frame of a video, separated from the first by text.
    """
    config, params, _, _ = golden("qwen3_vl")
    images = [random_image(config, grid, 1) for grid in ((1, 12, 8), (1, 4, 6), (2, 4, 10))]
    prompt = np.random.default_rng(1).integers(1, IMAGE, 216)
    for start, num_units, id in ((50, 24, IMAGE), (120, 6, IMAGE), (165, 10, VIDEO)):
        prompt[start : start + num_units] = id
    prompt[185:195] = VIDEO
    monkeypatch.setattr("jaxrl.sampling.engine.list_prefill_buckets", lambda *_: [64])
    engine = build_engine(
        "qwen3_vl", num_rows=1, num_pages=16, max_total_tokens=240,
        max_units=50,
    )  # fmt: skip
    request = Request(
        prompt_ids=tuple(prompt.tolist()), sample_key=KEY, budget=TURN, attachments=tuple(images)
    )
    samples = play(engine, params, [request])
    assert len(samples[0][0]) == len(prompt) + TURN
    assert_logprobs_agree(samples, full_pass_logprobs(config, params, samples, [images]))


def test_text_is_read_as_by_a_program_without_images():
    """Bit for bit, whatever was read before: no text token depends on image embeddings."""
    engine = shared_engine("qwen3_vl")
    sampler = engine.programs
    weights = jax.jit(sampler.convert_params)(golden("qwen3_vl")[1])
    ids = np.random.default_rng(2).integers(1, IMAGE, (4, sampler.block_tokens)).astype(np.int32)
    blocks = decode.PrefillBlocks(
        token_ids=ids,
        start=np.array([0, 16, 32, 0], np.int32),
        counts=np.array([16, 16, 5, 3], np.int32),
        tables=np.array([[0, 1, 2]] * 3 + [[3, 4, 5]], np.int32),
        token_arrays={
            "positions": np.arange(48, dtype=np.int32)[:, None]
            .repeat(3, 1)
            .reshape(3, 16, 3)[[0, 1, 2, 0]],
            "units": np.full(ids.shape, -1, np.int32),
        },
    )
    embeds = sampler.init_embeds(engine._max_units)
    prefill = jax.jit(sampler.prefill)
    empty = sampler.init_cache(6, 16)
    bare = dataclasses.replace(blocks, token_arrays={"positions": blocks.token_arrays["positions"]})
    expected, _ = prefill(weights, empty, bare)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(expected))
    for value in (0, np.nan):
        actual, _ = prefill(weights, empty, blocks, jnp.full_like(embeds, value))
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_images_that_disagree_with_the_tokens_are_refused():
    engine = shared_engine()
    engine.set_weights(golden()[1])
    image = (golden()[3][0],)
    request = Request(prompt_ids=(1, *[IMAGE] * 5, 2), sample_key=KEY, budget=4, attachments=image)
    with pytest.raises(ValueError, match=r"has 5 image tokens .* expected 6 for its 1 images"):
        engine.submit([request])
    assert engine.is_idle
