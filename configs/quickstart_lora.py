r"""The quickstart's RL stage with a LoRA adapter, after a warm start of the full model.

    python -m jaxrl.launch --config=configs/quickstart.py --workdir=runs/warm \
      --config.stages="('sft',)"
    python -m jaxrl.launch --config=configs/quickstart_lora.py --workdir=runs/lora

In 80 steps instead of 60, it reaches the exact match of full training (docs/adapters.md). All other
settings are those of quickstart.py. The model's width is 64, so a rank of 64 saves no memory; the
run only shows that the method learns.
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
