"""The DAPO method of configs/dapo.py on short word problems, on a laptop CPU.

python -m examples.math_world --out=data/math
python -m jaxrl.launch --config=configs/dapo_small.py --workdir=runs/dapo_small

To use another data folder, append it: --config=configs/dapo_small.py:data/other
"""

from ml_collections import ConfigDict

from configs.dapo import set_environment, set_method
from configs.small_world import small_math


def get_config(world: str = "data/math") -> ConfigDict:
    config = small_math(world)
    set_environment(config)
    set_method(config)
    config.rollout.group_size = 16
    config.rollout.max_num_seqs = 256
    config.filter.tasks_per_batch = 16
    config.shaping.overlong_buffer = 20  # a fifth of the limit, as published
    config.optimizer.num_minibatches = 4
    return config
