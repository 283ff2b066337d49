r"""The quickstart's reinforcement learning with an adapter, after a warm start of the whole model.

    python -m jaxrl.launch --config=configs/quickstart.py --workdir=runs/warm \
      --config.stages="('sft',)"
    python -m jaxrl.launch --config=configs/quickstart_lora.py --workdir=runs/lora

Exact match equals that of the whole model, in 80 steps instead of 60 (docs/adapters.md). Everything
else is as in quickstart.py. The model is 64 wide, so this rank saves no memory; it shows that the
method learns.
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
