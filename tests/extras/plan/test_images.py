"""The plan of a model that reads images."""

from jaxrl.extras.plan.memory import Target, make_plan
from tests.helpers import resolved, settings
from tests.vision import golden

GPU = Target(platform="gpu", num_devices=1, memory_bytes=2**36)
SIZES = {
    "stages": ("train",),
    "rollout.tasks_per_step": 4,
    "rollout.group_size": 4,
    "rollout.max_prompt_tokens": 128,
    "rollout.max_total_tokens": 256,
    "rollout.max_num_seqs": 4,
    "optimizer.micro_rows": 2,
    "mesh.data": 1,
}


def phases(name="qwen2_5_vl", **changes):
    plan = make_plan(resolved(settings(**SIZES, **changes)), golden(name)[0], GPU)
    return {phase.name: phase for phase in plan.phases}


def test_patches_of_a_micro_batch_and_of_what_is_read():
    tools = {"env.name": "search", "model.dtype": "bfloat16"}
    update = phases(**tools, **{"rollout.max_image_tokens": 50})["train update"]
    # Of 2 trajectories with 50 units of 4 patches, each of 24 values in bfloat16 and 4 places; of
    # this micro-batch and of the next, however many there are.
    # Of every token 40 bytes beside them.
    assert update.persistent["batch"] == 2 * 2 * 50 * 4 * (2 * 24 + 4 * 4) + 40 * 16 * 256
    fewer = phases(**tools, **{"rollout.max_image_tokens": 25})["train update"].moments["images"]
    terms = update.moments["images"]
    assert terms["activations of patches"] == 2 * fewer["activations of patches"] > 0
    assert (
        terms["saved image activations"] == 4 * 2 * 50 * 4 * 16 * 2
    )  # layers, rows, units, patches, width, bfloat16
    reading = phases(**tools)["rollout"].moments["images"]
    assert reading["patches"] == 4 * 256 * 4 * (24 + 4)
    # Without tools images stand in prompts alone.
    one_turn = phases(**{"env.name": "math"})["rollout"].moments["images"]
    assert one_turn["patches"] == 4 * 128 * 4 * (24 + 4)


def test_a_hybrid_keeps_states_beside_images():
    rollout = phases("qwen3_5_vl")["rollout"]
    # 4 rows and 4 prompts; 4 heads of 8 x 8, and 3 tokens of (2 + 2 + 4) x 8 channels.
    assert rollout.persistent["states of recurrent layers"] == 8 * 4 * (4 * 8 * 8 + 3 * 8 * 8)
    assert rollout.moments["images"]["patches"] == 4 * 256 * 4 * (24 + 4)


def test_a_frozen_tower_keeps_nothing():
    frozen = phases(**{"model.freeze_tower": True})["train update"].moments["images"]
    assert "saved image activations" not in frozen
    trained = phases()["train update"].moments["images"]
    assert frozen["activations of patches"] < trained["activations of patches"]
