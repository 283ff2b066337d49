"""Plain GRPO that learns to search in 20 steps and collapses by step 100, in minutes on a CPU.

python -m examples.quickstart_world --out=data/collapse --max_hops=1
python -m jaxrl.launch --config=configs/collapse.py --workdir=runs/collapse

Uses the quickstart's model and warm start, with one-hop questions. Four updates per batch, no KL
term, small groups and a learning rate that rises to three times the quickstart's reproduce the
collapse that users of search training see after hundreds of steps. docs/research/results.md has
the results and remedies.

To use another data folder, append it: --config=configs/collapse.py:data/other
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config(world: str = "data/collapse") -> ConfigDict:
    config = quickstart.get_config(world)
    config.num_steps = 150
    config.rollout.tasks_per_step = 8
    config.rollout.group_size = 4
    config.rollout.max_num_seqs = 32
    config.optimizer.num_minibatches = 4
    config.optimizer.lr = 3e-3
    config.optimizer.warmup_steps = 200  # updates: 50 steps
    config.eval.every_steps = 10
    config.eval.suites = ("sampled",)
    return config
