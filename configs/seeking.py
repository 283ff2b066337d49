"""Train the model of configs/looking.py to search for what it sees, on a laptop CPU.

python -m examples.looking_world --out=data/seeking --kind=seeking
python -m jaxrl.launch --config=configs/seeking.py --workdir=runs/seeking

To use another data folder, append it: --config=configs/seeking.py:data/other
"""

from ml_collections import ConfigDict

from configs import looking


def get_config(world: str = "data/seeking") -> ConfigDict:
    config = looking.get_config(world)
    config.num_steps = 200
    config.env.name = "search"
    config.search.local.corpus = f"{world}/corpus.jsonl"
    config.search.local.topk = 1  # color or shape alone finds one of four
    config.sft.num_steps = 900
    config.loss.entropy_coef = 0.02
    config.optimizer.lr = 1e-3
    config.optimizer.schedule = "constant"

    config.rollout.max_response_tokens = 32
    config.rollout.max_observation_tokens = 40
    config.rollout.max_total_tokens = 96
    config.rollout.max_turns = 1
    config.rollout.observation_lag_chunks = 1

    config.eval.final_suites = ("sampled", "greedy", "blank_images", "empty_search")
    return config
