"""Pass@k training as in configs/passk.py, in the quickstart's world, on a laptop CPU.

python -m examples.quickstart_world --out=data/quickstart
python -m jaxrl.launch --config=configs/passk_small.py --workdir=runs/passk_small

Another world's folder may follow the file's name: --config=configs/passk_small.py:data/other
"""

from ml_collections import ConfigDict

from configs.passk import set_method
from configs.small_world import small_world


def get_config(world: str = "data/quickstart") -> ConfigDict:
    config = small_world(world)
    set_method(config)
    config.eval.samples = 8
    config.eval.best_metric = "val-core/all/exact_match/mean@8"
    return config
