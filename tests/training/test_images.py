"""Packing and the update with images: every way to pack is one computation."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config import default_config
from jaxrl.models.policy import Model
from jaxrl.objectives.metrics import Metric
from jaxrl.training.optimizer import frozen_entries, make_optimizer
from jaxrl.training.packing import BatchShape, assign_rows, make_items, pack
from jaxrl.training.update import Gradient, UpdateStep, init_state, put_batch
from jaxrl.types import Image
from tests.helpers import Sequence, relative_distance
from tests.toys import one_device_mesh
from tests.vision import golden, logits_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

IMAGE, NUM_TOKENS = 90, 96


@dataclasses.dataclass(frozen=True)
class Seen(Sequence):
    """A sequence with images."""

    images: tuple = ()


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
        images=tuple(images),
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


def packed_in(shape, *, num_shards=1):
    kept = sequences()
    weights = [np.where(s.loss_mask, 0.1, 0).astype(np.float32) for s in kept]
    return pack(
        kept, ADVANTAGES, shape, token_fields={"token_weights": weights}, num_shards=num_shards
    )


def shape_of(num_micro, micro_rows, row_tokens, **more):
    sizes = {"num_micro": num_micro, "micro_rows": micro_rows, "row_tokens": row_tokens}
    return BatchShape(**sizes, vision=golden()[0].vision, **more)


SHAPES = {
    "apart": shape_of(5, 1, 48),
    "shared prompts": shape_of(2, 1, 144, shares_prompts=True, max_tokens=48),
    "few images": shape_of(5, 1, 96, max_tokens=48, max_image_tokens=18),
}


def model(frozen=()):
    settings = {"num_tokens": NUM_TOKENS, "scan_layers": True, "remat": "names"}
    return Model(golden()[0], one_device_mesh(), **settings).freeze(*frozen)


def gradient_of(shape, frozen=()):
    packed = packed_in(shape)
    batch = put_batch(one_device_mesh(), packed.batch)
    return Gradient(model(frozen), weighted)(golden()[1], batch, packed).gradients


@cache
def naive():
    """The gradient of the sequences, each in a row and with images of its own."""
    config, params = golden()[:2]

    rows = [np.pad(one.token_ids, (0, 48 - len(one.token_ids))) for one in sequences()]

    def loss(params):
        total = 0.0
        each = logits_of(config, params, rows, [one.images for one in sequences()])
        for one, logits, advantage in zip(sequences(), each, ADVANTAGES, strict=True):
            at = np.flatnonzero(one.loss_mask)
            scored = jax.nn.log_softmax(logits)[at - 1, one.token_ids[at]]
            total -= 0.1 * advantage * scored.sum()
        return total

    return jax.jit(jax.grad(loss))(params)


@pytest.mark.parametrize("name", SHAPES)
def test_all_packings_have_the_gradient_of_each_sequence_alone(name):
    found = gradient_of(SHAPES[name])
    assert relative_distance(found, naive()) < 1e-5
    assert relative_distance(found["vision"], naive()["vision"]) < 1e-5


def test_a_frozen_tower_gets_no_gradient_and_stays_as_it_is():
    config, params = golden()[:2]
    settings = default_config()
    settings.model.vision.train = False
    settings.optimizer.update(lr=0.1, weight_decay=0.1, warmup_steps=0)
    frozen = frozen_entries(settings)
    assert frozen == ("vision",)
    optimizer, mesh = make_optimizer(settings.optimizer, 3, frozen), one_device_mesh()
    packed = packed_in(SHAPES["apart"])
    batch = put_batch(mesh, packed.batch)
    update = UpdateStep(model(frozen), weighted, optimizer)
    state = init_state(jax.tree.map(jnp.array, params), mesh, config, optimizer)
    moments = jax.tree.leaves(state.opt_state)
    num_trained = sum(x.size for x in jax.tree.leaves({**params, "vision": {}}))
    assert sum(x.size for x in moments if x.ndim) == 2 * num_trained
    state, metrics = update(state, batch, packed)
    jax.tree.map(np.testing.assert_array_equal, state.params["vision"], params["vision"])
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), state.params, params)
    assert all(jax.tree.leaves({**changed, "vision": {}}))
    rest = {name: entry for name, entry in naive().items() if name != "vision"}
    norm = np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(rest)))
    np.testing.assert_allclose(metrics["grad_norm"].value, norm, rtol=1e-4)


def test_an_image_that_several_rows_begin_with_is_there_once_on_a_device():
    vision = golden()[0].vision
    packed = packed_in(shape_of(1, 6, 48))
    images = packed.batch.images
    # 24 + 40 patches of the group, 8 of the tool and 24 of the other: `second` is the same.
    assert (images.places[0, 0, :, 0] > 0).sum() == 24 + 40 + 8 + 24
    room = 6 * 48 * vision.unit
    assert images.patches.shape[2] == room // packed.image_part
    assert room // (2 * packed.image_part) < 96 <= room // packed.image_part
    # On two devices each has those of its own rows.
    apart = packed_in(shape_of(1, 6, 48), num_shards=2).batch.images
    counts = (apart.places[0, :, :, 0] > 0).sum(axis=1)
    assert counts.sum() > 96
    assert apart.units.max() < counts.max() // vision.unit


def test_rows_are_shared_by_sequences_whose_images_have_room():
    vision = golden()[0].vision
    items = make_items(sequences(), shares_prompts=True, vision=vision)
    assert [item.units for item in items] == [16, 18, 16, 0, 16]
    assert [item.shared_units for item in items] == [16, 16, 16, 0, 16]
    assert items[0].prompt == items[1].prompt == items[2].prompt
    # The same ids, but other images.
    assert (sequences()[4].token_ids[:25] == sequences()[0].token_ids[:25]).all()
    assert items[4].prompt != items[0].prompt
    alone = make_items(sequences(), shares_prompts=False, vision=vision)
    assert all(sum(alone[i].units for i in row) <= 18 for row in assign_rows(alone, 500, 18))
    assert sorted(map(len, assign_rows(alone, 500, 34))) == [2, 3]


def test_too_many_images_are_refused():
    with pytest.raises(ValueError, match=r"expected at most 68\. Raise .*max_image_tokens"):
        packed_in(shape_of(5, 1, 48, max_image_tokens=17))


def test_a_batch_without_images_has_none():
    text = sequences()[3]
    packed = pack([text], ADVANTAGES[:1], SHAPES["apart"])
    assert packed.batch.images is None
    assert packed.image_part == 0
