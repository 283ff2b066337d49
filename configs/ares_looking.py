"""ARES as in configs/ares.py, on questions about small pictures, on a laptop CPU.

python -m examples.looking_world --out=data/looking
python -m jaxrl.launch --config=configs/ares_looking.py --workdir=runs/ares_looking

Another world's folder may follow the file name: --config=configs/ares_looking.py:data/other
"""

from ml_collections import ConfigDict

from configs import looking
from configs.ares import set_method


def get_config(world: str = "data/looking") -> ConfigDict:
    config = looking.get_config(world)
    set_method(config)
    config.num_steps = 18  # later, hardly any group is left that is not all right
    config.shaping.bootstrap_tasks = 64
    config.advantage.grpo.normalize_std = True
    config.loss.entropy_coef = 0.0  # replaced by the entropy reward
    config.optimizer.num_minibatches = 4
    config.eval.temperature = 0.5  # top_p is 1 here; configs/ares.py uses 0.99
    return config
