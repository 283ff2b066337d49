"""DAPO as in configs/dapo.py, in the quickstart's world, on a laptop CPU.

python -m examples.quickstart_world --out=data/quickstart
python -m jaxrl.launch --config=configs/dapo_small.py --workdir=runs/dapo_small

Another world's folder may follow the file's name: --config=configs/dapo_small.py:data/other
"""

from ml_collections import ConfigDict

from configs.dapo import set_method
from configs.small_world import small_world


def get_config(world: str = "data/quickstart") -> ConfigDict:
    config = small_world(world)
    set_method(config)
    config.filter.tasks_per_batch = 16
    config.shaping.overlong_max_tokens = 176  # with a prompt of 16, where a trajectory is cut off
    config.shaping.overlong_buffer = 16
    config.optimizer.num_minibatches = 2
    return config
