"""Search-R1 as in configs/search_r1.py, in the quickstart's world, on a laptop CPU.

Search is BM25.

python -m examples.quickstart_world --out=data/quickstart
python -m jaxrl.launch --config=configs/search_r1_small.py --workdir=runs/search_r1_small

Another world's folder may follow the file name: --config=configs/search_r1_small.py:data/other
"""

from ml_collections import ConfigDict

from configs.search_r1 import set_method
from configs.small_world import small_world


def get_config(world: str = "data/quickstart") -> ConfigDict:
    config = small_world(world)
    set_method(config)
    return config
