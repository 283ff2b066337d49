"""Train the model of configs/looking.py to answer questions about videos, on a laptop CPU.

python -m examples.looking_world --out=data/moving --kind=moving
python -m jaxrl.launch --config=configs/moving.py --workdir=runs/moving

To use another data folder, append it: --config=configs/moving.py:data/other
"""

from ml_collections import ConfigDict

from configs import looking


def get_config(world: str = "data/moving") -> ConfigDict:
    config = looking.get_config(world)
    config.sft.num_steps = 1000
    config.sft.optimizer.lr = 1e-3  # at 3e-3, it often learns no direction
    config.optimizer.lr = 2e-4  # at 5e-4, it may forget the shapes
    config.rollout.max_prompt_tokens = 28
    config.rollout.max_total_tokens = 38
    config.rollout.max_image_tokens = 8
    return config
