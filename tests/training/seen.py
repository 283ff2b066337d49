"""Sequences with images, and their gradient computed for each alone: to compare packings with."""

import dataclasses
from functools import cache

import jax
import numpy as np

from jaxrl.extras.vision.processor import Image
from jaxrl.objectives.metrics import Metric
from jaxrl.training.packing import pack
from tests.helpers import Sequence
from tests.vision import golden, logits_of

IMAGE, NUM_TOKENS = 90, 96


@dataclasses.dataclass(frozen=True)
class Seen(Sequence):
    """A sequence with images."""

    attachments: tuple = ()


def draw(seed, h, w):
    rng = np.random.default_rng(seed)
    return Image(patches=rng.standard_normal((h * w, 24)).astype(np.float32), grid=(1, h, w))


def sequence(seed, parts, prompt_parts):
    """Text and images in turn; sampled is what follows the prompt, but for images and their ends.

    Args:
        seed: of what is sampled.
        parts: numbers of tokens of text, and images.
        prompt_parts: of these belong to the prompt, which is the same for all seeds.
    """
    ids, mask, images = [], [], []
    for index, part in enumerate(parts):
        rng = np.random.default_rng([0 if index < prompt_parts else seed, index])
        if isinstance(part, Image):
            images.append(part)
            ids += [92, *[IMAGE] * (part.num_patches // 4), 93]
            mask += [False] * (2 + part.num_patches // 4)
        else:
            ids += rng.integers(4, 80, part).tolist()
            mask += [index >= prompt_parts] * part
    mask, rng = np.array(mask), np.random.default_rng(seed)
    logprobs = np.where(mask, -rng.random(len(ids)), 0).astype(np.float32)
    return Seen(
        token_ids=np.array(ids, np.int32),
        loss_mask=mask,
        rollout_logprobs=logprobs,
        attachments=tuple(images),
    )


@cache
def sequences():
    """A group of three, one of them with an image of a tool; text alone; the same with others."""
    first, second, later = draw(0, 4, 6), draw(1, 10, 4), draw(2, 2, 4)
    other = draw(3, 4, 6)
    prompt = [4, first, 3, second, 2]
    return (
        sequence(1, [*prompt, 5], 5),
        sequence(2, [*prompt, 3, later, 4], 5),
        sequence(3, [*prompt, 7], 5),
        sequence(4, [6, 9], 1),
        sequence(5, [4, other, 3, second, 2, 6], 5),
    )


def weighted(logprobs, entropies, micro):
    """Minus the log-probabilities, times what stands in the place of advantages."""
    return -logprobs * micro.advantages, {"entropy": Metric(entropies)}


ADVANTAGES = [np.float32(x) for x in (1.0, -0.5, 2.0, 0.7, -1.3)]


def packed_in(shape, kept=None, advantages=ADVANTAGES, *, num_shards=1):
    kept = kept or sequences()
    weights = [np.where(s.loss_mask, 0.1, 0).astype(np.float32) for s in kept]
    return pack(
        kept, advantages, shape, token_fields={"token_weights": weights}, num_shards=num_shards
    )


@cache
def naive(name="qwen2_5_vl"):
    """The gradient of the sequences, each in a row and with images of its own."""
    config, params = golden(name)[:2]

    rows = [np.pad(one.token_ids, (0, 48 - len(one.token_ids))) for one in sequences()]

    def loss(params):
        total = 0.0
        each = logits_of(config, params, rows, [one.attachments for one in sequences()])
        for one, logits, advantage in zip(sequences(), each, ADVANTAGES, strict=True):
            at = np.flatnonzero(one.loss_mask)
            scored = jax.nn.log_softmax(logits)[at - 1, one.token_ids[at]]
            total -= 0.1 * advantage * scored.sum()
        return total

    return jax.jit(jax.grad(loss))(params)
