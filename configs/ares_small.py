"""ARES as in configs/ares.py, in the quickstart's world, on a laptop CPU.

python -m examples.quickstart_world --out=data/quickstart
python -m jaxrl.launch --config=configs/ares_small.py --workdir=runs/ares_small

Another world's folder may follow the file's name: --config=configs/ares_small.py:data/other
"""

from ml_collections import ConfigDict

from configs.ares import set_method
from configs.small_world import small_world


def get_config(world: str = "data/quickstart") -> ConfigDict:
    config = small_world(world)
    set_method(config)
    config.shaping.bootstrap_tasks = 16
    config.optimizer.num_minibatches = 2
    config.eval.temperature = 0.5
    return config
