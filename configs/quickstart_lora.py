"""The quickstart's reinforcement learning by an adapter, from a warm start of the whole model.

    python -m jaxrl.launch --config=configs/quickstart.py --workdir=runs/warm \
      --config.stages="('sft',)"
    python -m jaxrl.launch --config=configs/quickstart_lora.py --workdir=runs/lora

Exact match comes to that of the whole model, in 80 steps rather than 60; docs/lora.md has the
table. All else, the learning rate too, is as in quickstart.py. The model is 64 wide, so this rank
saves nothing: it shows that the method learns.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config(world: str = "data/quickstart") -> ConfigDict:
    config = quickstart.get_config(world)
    config.stages = ("train", "evaluate")
    config.num_steps = 80
    config.model.path = "runs/warm/export"
    config.model.lora.rank = 64
    config.model.lora.alpha = 64.0
    return config
