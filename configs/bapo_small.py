"""BAPO as in configs/bapo.py, in the quickstart's world, on a laptop CPU.

python -m examples.quickstart_world --out=data/quickstart
python -m jaxrl.launch --config=configs/bapo_small.py --workdir=runs/bapo_small

Another world's folder may follow the file's name: --config=configs/bapo_small.py:data/other
"""

from ml_collections import ConfigDict

from configs.bapo import set_method
from configs.small_world import small_world


def get_config(world: str = "data/quickstart") -> ConfigDict:
    config = small_world(world)
    set_method(config)
    config.eval.max_tasks = 32
    config.optimizer.num_minibatches = 2
    return config
