"""The Search-R1 method of configs/search_r1.py on the quickstart's data, on a laptop CPU.

Search is BM25.

python -m examples.quickstart_world --out=data/quickstart
python -m jaxrl.launch --config=configs/search_r1_small.py --workdir=runs/search_r1_small

To use another data folder, append it: --config=configs/search_r1_small.py:data/other
"""

from ml_collections import ConfigDict

from configs.search_r1 import set_method
from configs.small_world import small_world


def get_config(world: str = "data/quickstart") -> ConfigDict:
    config = small_world(world)
    set_method(config)
    return config
