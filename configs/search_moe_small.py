"""The quickstart with the method of configs/search_moe.py and a small mixture of experts.

Search is BM25. The clip range is ten times wider, because answers are short.

python -m examples.quickstart_world --out=data/quickstart_moe --num_experts=8
python -m jaxrl.launch --config=configs/search_moe_small.py --workdir=runs/search_moe_small

To use another data folder, append it: --config=configs/search_moe_small.py:data/other
"""

from ml_collections import ConfigDict

from configs import quickstart
from configs.search_moe import set_method


def get_config(world: str = "data/quickstart_moe") -> ConfigDict:
    config = quickstart.get_config(world)
    set_method(config)
    config.loss.clip_low, config.loss.clip_high = 3e-3, 4e-3
    return config
