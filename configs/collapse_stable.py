"""The world of configs/collapse.py, without the collapse.

python -m examples.quickstart_world --out=data/collapse --max_hops=1
python -m jaxrl.launch --config=configs/collapse_stable.py --workdir=runs/collapse_stable

Same data, updates and learning rate; what differs is what configs/search_r1_stable.py has too.
docs/results.md has five seeds over 1,000 steps.

Another world's folder may follow the file's name: --config=configs/collapse_stable.py:data/other
"""

from ml_collections import ConfigDict

from configs import collapse


def get_config(world: str = "data/collapse") -> ConfigDict:
    config = collapse.get_config(world)
    # Gradients shrink as answers get right, and Adam makes steps of full size of them all the same.
    # An epsilon of the size that a parameter's gradient has at first takes that away.
    config.optimizer.epsilon = 1e-2
    config.watch.name = "sentinel"
    config.watch.action = "warn"
    config.watch.actions = {"reward_fell": "roll_back", "responses_cut": "roll_back"}
    config.checkpoint.every_steps = 10
    config.checkpoint.keep = 6
    return config
