"""configs/collapse.py with the protection against collapse of configs/search_r1_stable.py.

python -m examples.quickstart_world --out=data/collapse --max_hops=1
python -m jaxrl.launch --config=configs/collapse_stable.py --workdir=runs/collapse_stable

To use another data folder, append it: --config=configs/collapse_stable.py:data/other
"""

from ml_collections import ConfigDict

from configs import collapse
from configs.search_r1_stable import set_stability


def get_config(world: str = "data/collapse") -> ConfigDict:
    config = collapse.get_config(world)
    set_stability(config)
    config.checkpoint.every_steps = 5
    config.checkpoint.keep = 8
    return config
