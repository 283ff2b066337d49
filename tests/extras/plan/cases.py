"""A 7B model on a node with eight GPUs, for tests of the plan."""

from jaxrl.builders.capacity import GIB
from jaxrl.builders.validation import validate
from jaxrl.config import default_config
from jaxrl.extras.plan import memory
from jaxrl.models.registry import read_architecture
from tests.helpers import ROOT

QWEN_7B = read_architecture(ROOT / "configs/models/qwen2.5-7b")
QWEN_30B = read_architecture(ROOT / "configs/models/qwen3-30b-a3b")
QWEN_32B = read_architecture(ROOT / "configs/models/qwen3-32b")
NODE = memory.Target(platform="gpu", num_devices=8, memory_bytes=80 * GIB)
AHEAD = {"rollout.async_level": 1, "loss.correction.level": "token", "rollout.cache_gib": 4.0}


def large_run(fsdp=8, tensor=1, **keys):
    config = default_config()
    config.stages = ("train",)
    config.model.path = "configs/models/qwen2.5-7b"
    config.model.dtype = "bfloat16"
    config.mesh.fsdp, config.mesh.tensor = fsdp, tensor
    config.update_from_flattened_dict(keys)
    return validate(config, needs_data=False)


def train_phase(config, model=QWEN_7B, target=NODE):
    return memory.plan_update(config, model, target, "train")
