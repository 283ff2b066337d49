"""The engine with images in prompts and observations, against the full pass."""

import dataclasses
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
from tests.toys import count_compilations, one_device_mesh
from tests.vision import golden, logits_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

IMAGE, NUM_TOKENS = 90, 96
KEY = np.zeros(2, np.uint32)
TURN = 5  # tokens sampled before an observation


@cache
def engine(name="qwen2_5_vl"):
    """So few pages that requests give up theirs, and room for the images of one at a time."""
    automaton = StopAutomaton([bytes([i]) for i in range(NUM_TOKENS)], ())
    return Engine(
        golden(name)[0],
        one_device_mesh(),
        automaton,
        num_tokens=NUM_TOKENS,
        eos_ids=(),
        num_rows=4,
        num_pages=8,
        max_prompt_tokens=64,
        max_total_tokens=96,
        max_units=35,
        chunk_tokens=4,
    )


def play(played, params, requests, observations):
    """Ids of each request, whether they were sampled, and log-probabilities of those sampled."""
    played.set_weights(params)
    numbers = played.submit(requests)
    ids = [list(request.prompt_ids) for request in requests]
    mask = [[False] * len(one) for one in ids]
    logprobs = [[] for _ in ids]
    waiting = dict(zip(numbers, observations, strict=True))
    while not played.is_idle:
        for event in played.step():
            index = numbers.index(event.request)
            ids[index] += event.token_ids.tolist()
            mask[index] += [True] * len(event.token_ids)
            logprobs[index] += event.logprobs.tolist()
            if event.status == decode.RUNNING:
                continue
            if (observation := waiting.pop(event.request, None)) is None:
                played.finish(event.request)
                continue
            tokens, images = observation
            played.resume([(event.request, tokens, TURN)], {event.request: images})
            ids[index] += tokens
            mask[index] += [False] * len(tokens)
    return [tuple(map(np.array, one)) for one in zip(ids, mask, logprobs, strict=True)]


@pytest.mark.parametrize(
    "name",
    ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.slow(instead="::[qwen2_5_vl]"))],
)
def test_images_are_read_as_the_full_pass_reads_them(name):
    config, params, wanted, images = golden(name)
    prompt = tuple(map(int, wanted["token_ids"][0]))
    blank = tuple(dataclasses.replace(one, patches=np.zeros_like(one.patches)) for one in images)
    rng = np.random.default_rng(0)
    patches = rng.standard_normal((24, config.tower.patch_values)).astype(np.float32)
    seen_later = Image(patches=patches, grid=(1, 6, 4))
    keys = derive_sample_keys(0, 0, 0, np.zeros(5, int), np.arange(5), np.zeros(5, int))
    of_requests = [tuple(images)] * 3 + [blank, ()]
    prompts = [prompt] * 4 + [prompt[:3]]
    requests = [
        Request(prompt_ids=ids, sample_key=key, budget=TURN, attachments=own)
        for ids, key, own in zip(prompts, keys, of_requests, strict=True)
    ]
    look = ([40, 92, *[IMAGE] * 6, 93, 41], (seen_later,))
    words = ([42, 43], ())
    observations = [look, words, look, words, look]
    before = dataclasses.replace(engine(name).counts)
    played = play(engine(name), params, requests, observations)
    counts = engine(name).counts
    # A prompt is read once for its group; the same ids with other images are another prompt.
    assert counts.prefilled_prompt - before.prefilled_prompt == 2 * (len(prompt) - 1) + 2
    assert counts.preemptions > before.preemptions

    full = [(*own, *(more[1])) for own, more in zip(of_requests, observations, strict=True)]
    longest = max(len(ids) for ids, _, _ in played)
    rows = [np.pad(ids, (0, longest - len(ids))) for ids, _, _ in played]
    logits = jax.jit(partial(logits_of, config, rows=rows, images_of_rows=full))(params)
    scored = np.asarray(jax.nn.log_softmax(logits))
    for (ids, mask, logprobs), row in zip(played, scored, strict=True):
        at = np.flatnonzero(mask)
        assert len(at) == 2 * TURN
        np.testing.assert_allclose(logprobs, row[at - 1, ids[at]], atol=1e-4, rtol=0)
        assert not np.isin(ids[at], [IMAGE, config.video_id]).any()
    assert abs(scored[0, len(prompt) - 1] - scored[3, len(prompt) - 1]).max() > 0.1


@pytest.mark.minutes
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_prompt_read_in_pieces_is_that_of_the_full_pass(name, monkeypatch):
    """The pieces are cut within images, of which Qwen3-VL adds to states of several layers."""
    config, params, _, _ = golden(name)
    rng = np.random.default_rng(1)
    grids = [(1, 12, 8), (1, 4, 6), (1, 8, 10)]
    images = [
        Image(
            patches=rng.standard_normal((h * w, config.tower.patch_values)).astype(np.float32),
            grid=(t, h, w),
        )
        for t, h, w in grids
    ]
    text = partial(rng.integers, 1, IMAGE)
    units = [h * w // 4 for _, h, w in grids]  # 24, 6, 20
    starts = [50, 120, 180]  # the first and the last lie across 64 and 192
    prompt = text(size=216)
    for start, count in zip(starts, units, strict=True):
        prompt[start : start + count] = IMAGE
    automaton = StopAutomaton([bytes([i]) for i in range(NUM_TOKENS)], ())
    monkeypatch.setattr("jaxrl.sampling.engine.prefill_sizes", lambda *_: [64])
    played = Engine(
        config, one_device_mesh(), automaton, num_tokens=NUM_TOKENS, eos_ids=(), num_rows=1,
        num_pages=16, max_prompt_tokens=224, max_total_tokens=240, max_units=50,
        chunk_tokens=4,
    )  # fmt: skip
    played.set_weights(params)
    request = Request(
        prompt_ids=tuple(prompt.tolist()), sample_key=KEY, budget=TURN, attachments=tuple(images)
    )
    [number] = played.submit([request])
    ids, logprobs = prompt.tolist(), []
    while not played.is_idle:
        for event in played.step():
            ids += event.token_ids.tolist()
            logprobs += event.logprobs.tolist()
            if event.status != decode.RUNNING:
                played.finish(number)
    assert len(ids) == len(prompt) + TURN
    rows = [np.array(ids)]
    logits = jax.jit(partial(logits_of, config, rows=rows, images_of_rows=[images]))(params)
    scored = np.asarray(jax.nn.log_softmax(logits))[0]
    at = np.arange(len(prompt), len(ids))
    np.testing.assert_allclose(logprobs, scored[at - 1, rows[0][at]], atol=1e-4, rtol=0)


def test_no_program_is_compiled_but_those_ahead():
    """Text before any image, images of both sizes, text behind them; pages that are swapped."""
    config, params, wanted, images = golden()
    played = engine.__wrapped__()
    said = []
    played.compile(said.append)
    assert len(said) == played.num_compilations
    # Rows and way to draw of a program that decodes; on a CPU there is one for each past.
    kinds = {
        (function.name, variant[:2] if function.name == "decode" else variant)
        for function in played.functions
        for variant in function.variants
    }
    assert len(kinds) <= 10
    played.set_weights(params)
    words = Request(prompt_ids=(5, 6, 7), sample_key=KEY, budget=TURN)
    prompt = tuple(map(int, wanted["token_ids"][0]))
    assert sum(image.num_patches for image in images) > played.patch_sizes[0] > 24
    looks = [Request(prompt_ids=prompt, sample_key=KEY, budget=TURN, attachments=tuple(images))] * 3
    patches = np.zeros((24, config.tower.patch_values), np.float32)
    more = ([42, 43], ())
    small = ([40, 92, *[IMAGE] * 6, 93, 41], (Image(patches=patches, grid=(1, 6, 4)),))
    with count_compilations() as compiled:
        play(played, params, [words], [more])
        play(played, params, [words, *looks], [small, small, more, more])
        played.release()
        play(played, params, [words], [small])
    assert played.counts.preemptions > 0
    assert len(compiled) <= 2  # the empty cache, and rows


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_text_is_read_as_by_a_program_that_sees_nothing(name):
    """Bit for bit, whatever was seen before: no token of text takes anything of it."""
    sampler = engine(name).programs
    weights = jax.jit(sampler.convert_params)(golden(name)[1])
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
    seen = sampler.empty_embeds(engine(name)._max_units)
    append = jax.jit(sampler.append)
    empty = sampler.empty_cache(6, 16)
    bare = dataclasses.replace(blocks, token_arrays={"positions": blocks.token_arrays["positions"]})
    wanted, _ = append(weights, empty, bare)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(wanted))
    for value in (0, np.nan):
        got, _ = append(weights, empty, blocks, jnp.full_like(seen, value))
        jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_images_that_disagree_with_the_tokens_are_refused():
    engine().set_weights(golden()[1])
    own = (golden()[3][0],)
    request = Request(prompt_ids=(1, *[IMAGE] * 5, 2), sample_key=KEY, budget=4, attachments=own)
    with pytest.raises(ValueError, match=r"has 5 image tokens .* expected 6 for its 1 images"):
        engine().submit([request])
    assert engine().is_idle
