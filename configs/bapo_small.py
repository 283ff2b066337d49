"""The BAPO method of configs/bapo.py on questions, some without an answer, on a laptop CPU.

Search is BM25. The late stage starts after more than two low evaluations instead of five. Groups
are resampled in the late stage only, as in the paper.

python -m examples.bapo_world --out=data/bapo_small
python -m jaxrl.launch --config=configs/bapo_small.py --workdir=runs/bapo_small

To use another data folder, append it: --config=configs/bapo_small.py:data/other
"""

from ml_collections import ConfigDict

from configs.bapo import set_environment, set_method
from configs.small_world import small_world


def get_config(world: str = "data/bapo_small") -> ConfigDict:
    config = small_world(world)
    set_environment(config)
    set_method(config)
    config.shaping.stage_tolerance = 2  # a short run has few low evaluations
    config.num_steps = 60
    config.search.local.topk = 1
    config.rollout.max_observation_tokens = 40

    config.sft.num_steps = 900
    config.sft.optimizer.final_lr_fraction = 0.1
    config.rollout.max_turns = 3  # two searches and a sum
    config.rollout.max_response_tokens = 80
    config.rollout.max_total_tokens = 160

    config.optimizer.num_minibatches = 2
    config.eval.suites = ("sampled", "greedy")  # the stage gate uses the greedy suite
    config.checkpoint.every_steps = 300
    return config
