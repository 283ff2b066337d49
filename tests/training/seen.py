"""Sequences with images, and their gradient computed for each sequence alone."""

from functools import cache

import jax
import numpy as np

from jaxrl.extras.vision.processor import Image
from jaxrl.objectives.metrics import Metric
from jaxrl.training.packing import pack_sequences
from tests.helpers import Sequence
from tests.vision import golden, logits_of

IMAGE, VIDEO, NUM_TOKENS = 90, 91, 96


def draw(seed, h, w):
    rng = np.random.default_rng(seed)
    return Image(patches=rng.standard_normal((h * w, 24)).astype(np.float32), grid=(1, h, w))


def sequence(seed, parts, prompt_parts):
    """Return text and images in turn; text after the prompt is sampled.

    Args:
        seed: Random seed of the sampled text.
        parts: Images, and numbers of tokens of text.
        prompt_parts: Number of parts of the prompt, which is the same for all seeds.
    """
    ids, mask, images = [], [], []
    for index, part in enumerate(parts):
        rng = np.random.default_rng([0 if index < prompt_parts else seed, index])
        if isinstance(part, Image):
            images.append(part)
            ids += [92, *[VIDEO if part.times else IMAGE] * (part.num_patches // 4), 93]
            mask += [False] * (2 + part.num_patches // 4)
        else:
            ids += rng.integers(4, 80, part).tolist()
            mask += [index >= prompt_parts] * part
    mask, rng = np.array(mask), np.random.default_rng(seed)
    logprobs = np.where(mask, -rng.random(len(ids)), 0).astype(np.float32)
    return Sequence(
        token_ids=np.array(ids, np.int32),
        loss_mask=mask,
        rollout_logprobs=logprobs,
        attachments=tuple(images),
    )


@cache
def sequences():
    """Return five sequences: three share a prompt with images, one has only text."""
    first, second, later = draw(0, 4, 6), draw(1, 10, 4), draw(2, 2, 4)
    different = draw(3, 4, 6)
    prompt = [4, first, 3, second, 2]
    return (
        sequence(1, [*prompt, 5], 5),
        sequence(2, [*prompt, 3, later, 4], 5),
        sequence(3, [*prompt, 7], 5),
        sequence(4, [6, 9], 1),
        sequence(5, [4, different, 3, second, 2, 6], 5),
    )


def weighted(logprobs, entropies, micro):
    """Return a loss: minus the log-probabilities times the advantages."""
    return -logprobs * micro.advantages, {"entropy": Metric(entropies)}


ADVANTAGES = [np.float32(x) for x in (1.0, -0.5, 2.0, 0.7, -1.3)]


def packed_in(shape, selected=None, advantages=ADVANTAGES, *, num_shards=1):
    selected = selected or sequences()
    weights = [np.where(s.loss_mask, 0.1, 0).astype(np.float32) for s in selected]
    return pack_sequences(
        selected, advantages, shape, token_fields={"token_weights": weights}, num_shards=num_shards
    )


@cache
def naive(name="qwen2_5_vl"):
    """Return the gradient of the sequences, each in a row and with its own images."""
    config, params = golden(name)[:2]

    rows = [np.pad(s.token_ids, (0, 48 - len(s.token_ids))) for s in sequences()]

    def loss(params):
        total = 0.0
        each = logits_of(config, params, rows, [s.attachments for s in sequences()])
        for sequence, logits, advantage in zip(sequences(), each, ADVANTAGES, strict=True):
            at = np.flatnonzero(sequence.loss_mask)
            scored = jax.nn.log_softmax(logits)[at - 1, sequence.token_ids[at]]
            total -= 0.1 * advantage * scored.sum()
        return total

    return jax.jit(jax.grad(loss))(params)
