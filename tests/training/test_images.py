"""Packing and updates with images; results do not depend on the packing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.builders.method import build_optimizer_settings, find_frozen_entries
from jaxrl.config import default_config
from jaxrl.extras.vision.processor import Image
from jaxrl.models.attachments import POSITIONS, UNITS
from jaxrl.models.attention.reference import XLA
from jaxrl.models.policy import Model
from jaxrl.training.optimizer import make_optimizer
from jaxrl.training.packing import BatchShape, assign_rows, compute_sequence_sizes
from jaxrl.training.update import GradientStep, UpdateStep, init_state, shard_batch
from tests.helpers import relative_distance, resolved
from tests.toys import one_device_mesh
from tests.training.seen import (
    ADVANTAGES,
    NUM_TOKENS,
    naive,
    packed_in,
    sequence,
    sequences,
    weighted,
)
from tests.vision import golden

pytestmark = pytest.mark.usefixtures("quick_compilation")


def shape_of(num_micro, micro_rows, row_tokens, **more):
    sizes = {"num_micro": num_micro, "micro_rows": micro_rows, "row_tokens": row_tokens}
    return BatchShape(**sizes, tower=golden()[0].tower, **more)


SHAPES = {
    "apart": shape_of(5, 1, 48),
    "shared prompts": shape_of(2, 1, 144, shares_prompts=True, max_tokens=48),
    "few images": shape_of(5, 1, 96, max_tokens=48, max_units=18),
}


def model(frozen=(), name="qwen2_5_vl"):
    settings = {"num_tokens": NUM_TOKENS, "scan_layers": True, "remat": "names"}
    return Model(golden(name)[0], one_device_mesh(), XLA, frozen=frozen, **settings)


def gradient_of(shape, name):
    packed = packed_in(dataclasses.replace(shape, tower=golden(name)[0].tower))
    batch = shard_batch(one_device_mesh(), packed.batch)
    return GradientStep(model(name=name), weighted)(golden(name)[1], batch, packed).gradients


SLOW = pytest.mark.slow(instead="::[qwen2_5_vl]")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("qwen2_5_vl", "shared prompts"),
        ("qwen2_5_vl", "few images"),
        pytest.param("qwen3_vl", "shared prompts", marks=SLOW),
        pytest.param("qwen3_vl", "few images", marks=SLOW),
        pytest.param("qwen3_5_vl", "few images", marks=SLOW),
    ],
)
def test_all_packings_have_the_gradient_of_each_sequence_alone(name, shape):
    gradients = gradient_of(SHAPES[shape], name)
    assert relative_distance(gradients, naive(name)) < 1e-5
    assert relative_distance(gradients["vision"], naive(name)["vision"]) < 1e-5


def test_a_frozen_tower_gets_no_gradient_and_stays_as_it_is():
    params = golden()[1]
    settings = default_config()
    settings.model.freeze_tower = True
    settings.optimizer.update(lr=0.1, weight_decay=0.1, warmup_steps=0)
    frozen = find_frozen_entries(settings, golden()[0])
    assert frozen == ("vision",)
    optimizer = make_optimizer(build_optimizer_settings(resolved(settings), "train"))
    mesh = one_device_mesh()
    packed = packed_in(SHAPES["apart"])
    batch = shard_batch(mesh, packed.batch)
    policy = model(frozen)
    params_of_run, policy.base = policy.split(jax.tree.map(jnp.array, params))
    assert set(policy.base) == {"vision"}
    update = UpdateStep(policy, weighted, optimizer)
    state = init_state(params_of_run, mesh, policy.trained, optimizer)
    trained = {name: entry for name, entry in params.items() if name != "vision"}
    assert jax.tree.structure(state.params) == jax.tree.structure(trained)
    moments = jax.tree.leaves(state.opt_state)
    num_trained = sum(x.size for x in jax.tree.leaves(trained))
    assert sum(x.size for x in moments if x.ndim) == 2 * num_trained
    of_text = policy.without_attachments(batch)
    gradients = jax.eval_shape(update.gradient.init_sums.function, params, of_text).gradients
    assert jax.tree.structure(gradients) == jax.tree.structure(trained)
    state, metrics = update(state, batch, packed)
    whole = policy.merge(state.params)
    jax.tree.map(np.testing.assert_array_equal, whole["vision"], params["vision"])
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), state.params, trained)
    assert all(jax.tree.leaves(changed))
    rest = {name: entry for name, entry in naive().items() if name != "vision"}
    norm = np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(rest)))
    np.testing.assert_allclose(metrics["grad_norm"].value, norm, rtol=1e-4)


def test_an_image_of_a_shared_prompt_is_stored_once_per_device():
    tower = golden()[0].tower
    packed = packed_in(shape_of(1, 6, 48))
    _, coords = packed.attachments.make_shard_inputs(0, 0, np.float32)
    # 24 + 40 patches of the group, 8 of the tool and 24 of the other: `second` is the same.
    assert (coords[:, 0] > 0).sum() == 24 + 40 + 8 + 24
    room = 6 * 48 * tower.num_patches_per_token
    assert packed.attachments.num_patches == room // packed.attachments.divisor
    assert room // (2 * packed.attachments.divisor) < 96 <= room // packed.attachments.divisor
    # On two devices each has those of its own rows.
    apart = packed_in(shape_of(1, 6, 48), num_shards=2)
    counts = [
        (apart.attachments.make_shard_inputs(0, shard, np.float32)[1][:, 0] > 0).sum()
        for shard in range(2)
    ]
    assert sum(counts) > 96
    assert apart.batch.token_arrays[UNITS].max() < max(counts) // tower.num_patches_per_token


def test_an_image_is_on_each_device_that_has_its_tokens():
    tower, [sequence] = golden()[0].tower, sequences()[:1]
    selected, shape = [sequence, sequence], shape_of(1, 2, 48, num_pieces=4)
    packed = packed_in(shape, selected, ADVANTAGES[:2], num_shards=2)
    arrays = packed.batch.token_arrays
    # Tokens 4 + [6] + 3 + [10] + 2 + 5, each run between two marks: the first image is at 5 to 10,
    # the second at 16 to 25, and pieces have 12 tokens.
    assert packed.attachments.num_shards == 8
    coords = [packed.attachments.make_shard_inputs(0, shard, np.float32)[1] for shard in range(8)]
    first, second = (image.num_patches for image in sequence.attachments)
    assert [(x[:, 0] > 0).sum() for x in coords] == [first, second, second, 0] * 2
    first_units, second_units = (
        tower.collate([image]).units[0].tolist() for image in sequence.attachments
    )
    assert arrays[UNITS][0, 0, 5:11].tolist() == first_units
    assert arrays[UNITS][0, 0, 16:26].tolist() == second_units
    assert (np.delete(arrays[UNITS][0, 0], [*range(5, 11), *range(16, 26)]) == -1).all()
    undivided = dataclasses.replace(shape, num_pieces=1)
    whole = packed_in(undivided, selected, ADVANTAGES[:2], num_shards=2)
    np.testing.assert_array_equal(arrays[POSITIONS], whole.batch.token_arrays[POSITIONS])


def test_rows_have_room_for_the_images_of_their_sequences():
    items = compute_sequence_sizes(sequences(), SHAPES["shared prompts"])
    assert [item.units for item in items] == [16, 18, 16, 0, 16]
    assert [item.shared_units for item in items] == [16, 16, 16, 0, 16]
    assert items[0].prompt == items[1].prompt == items[2].prompt
    # The same ids, but other images.
    assert (sequences()[4].token_ids[:25] == sequences()[0].token_ids[:25]).all()
    assert items[4].prompt != items[0].prompt
    alone = compute_sequence_sizes(sequences(), SHAPES["apart"])
    assert all(sum(alone[i].units for i in row) <= 18 for row in assign_rows(alone, 500, 18))
    assert sorted(map(len, assign_rows(alone, 500, 34))) == [2, 3]


def test_a_video_of_a_shared_prompt_is_packed_like_an_image():
    """Two sequences of 4 + [8] + 2 tokens of a prompt, then 3 or 5; the video is between marks."""
    tower = golden()[0].tower
    patches = np.random.default_rng(0).standard_normal((32, 24)).astype(np.float32)
    video = Image(patches=patches, grid=(2, 4, 4), times=(0.0, 1.5))
    selected = [sequence(seed, [4, video, 2, 2 * seed + 1], 3) for seed in (1, 2)]
    shape = shape_of(1, 1, 48, shares_prompts=True, max_tokens=24)
    assert [(i.units, i.shared_units) for i in compute_sequence_sizes(selected, shape)] == [
        (8, 8)
    ] * 2
    packed = packed_in(shape, selected, ADVANTAGES[:2])
    arrays = {name: array[0, 0] for name, array in packed.batch.token_arrays.items()}
    [units] = tower.collate([video]).units
    assert arrays[UNITS][5:13].tolist() == units.tolist()
    assert (np.delete(arrays[UNITS], np.arange(5, 13)) == -1).all()
    assert arrays[POSITIONS][5:13].T.tolist() == [
        [5] * 4 + [11] * 4,  # 4 positions per second
        [5, 5, 6, 6] * 2,
        [5, 6, 5, 6] * 2,
    ]
    positions = tower.compute_positions(selected[0].token_ids, [video])
    np.testing.assert_array_equal(arrays[POSITIONS][: len(positions)], positions)
    _, coords = packed.attachments.make_shard_inputs(0, 0, np.float32)
    assert np.bincount(coords[:, 0])[1:].tolist() == [16, 16]  # each frame attends to itself


def test_too_many_images_are_refused():
    with pytest.raises(ValueError, match=r"expected at most 68\. Raise .*max_image_tokens"):
        packed_in(shape_of(5, 1, 48, max_units=17))
