"""Episodes four times as long as the context, on a laptop CPU: follow a trail of eight people.

python -m examples.trail_world --out=data/trail
python -m jaxrl.launch --config=configs/trail.py --workdir=runs/trail

A context has room for the prompt, a result and the next query. Before each further result, the
episode continues in a new context with the prompt and the last turn (docs/environments.md). To
keep all queries, set config.rollout.context.name to 'drop_observations'.

To use another data folder, append it: --config=configs/trail.py:data/other
"""

from ml_collections import ConfigDict

from configs.small_world import small_world


def get_config(world: str = "data/trail") -> ConfigDict:
    config = small_world(world)
    config.num_steps = 40
    config.search.local.topk = 2
    config.sft.num_steps = 700

    config.rollout.context.name = "last_turns"
    config.rollout.context.max_tokens = 196
    config.rollout.context.turn_tokens = 8
    config.rollout.max_observation_tokens = 100
    config.rollout.max_total_tokens = 1536
    config.rollout.max_turns = 9
    config.rollout.group_size = 4
    config.rollout.max_num_seqs = 32

    config.advantage.grpo.normalize_std = False
    config.optimizer.warmup_steps = 2
    config.eval.every_steps = 10
    config.eval.suites = ("sampled",)
    return config
