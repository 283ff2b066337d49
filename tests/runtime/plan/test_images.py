"""The plan of a model that reads images."""

from jaxrl.runtime.plan.memory import Target, make_plan
from tests.helpers import settings
from tests.vision import golden

GPU = Target(platform="gpu", num_devices=1, memory_bytes=2**36)
SIZES = {
    "stages": ("train",),
    "rollout.tasks_per_step": 4,
    "rollout.group_size": 4,
    "rollout.max_prompt_tokens": 128,
    "rollout.max_total_tokens": 256,
    "rollout.num_rows": 4,
    "optimizer.micro_rows": 2,
    "mesh.data": 1,
}


def phases(**changes):
    plan = make_plan(settings(**SIZES, **changes), golden()[0], GPU)
    return {phase.name: phase for phase in plan.phases}


def test_patches_of_a_micro_batch_and_of_what_is_read():
    update = phases(**{"rollout.max_image_tokens": 50})["train update"]
    half = phases(**{"rollout.max_image_tokens": 25})["train update"]
    # 8 micro-batches of 2 trajectories with 50 units of 4 patches, each of 24 values and 4 places.
    patches = 16 * 50 * 4 * 4 * (24 + 4)
    assert update.kept["batch"] - half.kept["batch"] == patches // 2
    terms, fewer = update.moments["images"], half.moments["images"]
    assert terms["activations of patches"] == 2 * fewer["activations of patches"] > 0
    kept = "images, kept for the backward pass"
    assert terms[kept] == 4 * 2 * 50 * 4 * 16 * 4  # layers, rows, units, patches, width, float32
    reading = phases()["rollout"].moments["images"]
    assert reading["patches"] == 4 * 256 * 4 * (24 + 4)


def test_a_frozen_tower_keeps_nothing():
    frozen = phases(**{"model.vision.train": False})["train update"].moments["images"]
    assert "images, kept for the backward pass" not in frozen
    assert (
        frozen["activations of patches"]
        < phases()["train update"].moments["images"]["activations of patches"]
    )
