"""The pass@k method of configs/passk.py on small puzzles, on a laptop CPU.

python -m examples.puzzle_world --out=data/puzzles
python -m jaxrl.launch --config=configs/passk_small.py --workdir=runs/passk_small

To use another data folder, append it: --config=configs/passk_small.py:data/other
"""

from ml_collections import ConfigDict

from configs.passk import set_method
from configs.small_world import small_world


def get_config(world: str = "data/puzzles") -> ConfigDict:
    config = small_world(world)
    set_method(config)
    config.num_steps = 80
    config.advantage.pass_at_k.k_schedule = ((0, 4), (40, 1))
    config.env.name = "math"
    config.search.local.corpus = ""

    config.sft.num_steps = 400
    config.sft.batch_size = 64
    config.sft.optimizer.micro_rows = 16

    config.rollout.tasks_per_step = 32
    config.rollout.max_prompt_tokens = 24
    config.rollout.max_response_tokens = 14
    config.rollout.max_total_tokens = 48
    config.rollout.max_num_seqs = 256
    config.rollout.chunk_tokens = 14
    config.optimizer.micro_rows = 32

    config.eval.every_steps = 20
    config.eval.samples = 8
    config.eval.final_suites = ("sampled", "greedy")
    config.eval.best_metric = "val-core/all/exact_match/mean@8"
    return config
