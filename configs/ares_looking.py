"""The ARES method of configs/ares.py on questions about small images, on a laptop CPU.

python -m examples.looking_world --out=data/looking
python -m jaxrl.launch --config=configs/ares_looking.py --workdir=runs/ares_looking

To use another data folder, append it: --config=configs/ares_looking.py:data/other
"""

from ml_collections import ConfigDict

from configs import looking
from configs.ares import set_method


def get_config(world: str = "data/looking") -> ConfigDict:
    config = looking.get_config(world)
    set_method(config)
    config.num_steps = 18  # later, nearly all groups are all correct
    config.shaping.bootstrap_tasks = 64
    config.advantage.grpo.normalize_std = True
    config.loss.entropy_coef = 0.0  # replaced by the entropy reward
    config.optimizer.num_minibatches = 4
    config.eval.temperature = 0.5  # top_p is 1 here; configs/ares.py uses 0.99
    return config
