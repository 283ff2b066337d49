"""The ARES method of configs/ares.py on short word problems, on a laptop CPU.

python -m examples.math_world --out=data/math
python -m jaxrl.launch --config=configs/ares_small.py --workdir=runs/ares_small

To use another data folder, append it: --config=configs/ares_small.py:data/other
"""

from ml_collections import ConfigDict

from configs.ares import set_method
from configs.small_world import small_math


def get_config(world: str = "data/math") -> ConfigDict:
    config = small_math(world)
    set_method(config)
    config.num_steps = 30  # later, nearly all groups are all correct
    config.shaping.bootstrap_tasks = 64
    config.optimizer.num_minibatches = 4
    config.eval.temperature = 0.5  # top_p is 1 here; configs/ares.py uses 0.99
    return config
