"""Plain GRPO that learns to search in 20 steps and has collapsed by step 100, on a CPU in minutes.

python -m examples.quickstart_world --out=data/collapse --max_hops=1
python -m jaxrl.launch --config=configs/collapse.py --workdir=runs/collapse

The quickstart's model and warm start, and questions of one hop. Four updates a batch, no KL term,
small groups and a learning rate that rises to three times the quickstart's bring about, on purpose,
what users of search training meet after some hundred steps. docs/results.md, Training that
collapses, has what it shows and what was tried against it.

Another world's folder may follow the file's name: --config=configs/collapse.py:data/other
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
