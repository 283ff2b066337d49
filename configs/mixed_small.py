"""Search and math in one run, on a laptop CPU.

python -m examples.mixed_world --out=data/mixed
python -m jaxrl.launch --config=configs/mixed_small.py --workdir=runs/mixed_small

To use another data folder, append it: --config=configs/mixed_small.py:data/other
"""

from ml_collections import ConfigDict

from configs.small_world import small_world


def get_config(world: str = "data/mixed") -> ConfigDict:
    config = small_world(world)
    config.num_steps = 60
    # Each environment sets its files, and what differs from the rest of this configuration.
    for key in ("tasks.train.source", "tasks.eval.source", "search.local.corpus", "sft.source"):
        config.update_from_flattened_dict({key: ""})
    config.environments = {
        "search": {
            "weight": 0.7,
            "tasks.train.source": f"{world}/search/questions_train.jsonl",
            "tasks.eval.source": f"{world}/search/questions_eval.jsonl",
            "sft.source": f"{world}/search/demonstrations.jsonl",
            "search.local.corpus": f"{world}/search/corpus.jsonl",
        },
        "math": {
            "weight": 0.3,
            "env.name": "math",
            "tasks.train.source": f"{world}/math/questions_train.jsonl",
            "tasks.eval.source": f"{world}/math/questions_eval.jsonl",
            "sft.source": f"{world}/math/demonstrations.jsonl",
            "reward.weights": {"math": 1.0},
            "reward.correct": "math",
        },
    }
    config.sft.num_steps = 900
    config.sft.optimizer.final_lr_fraction = 0.1

    config.rollout.tasks_per_step = 16
    config.rollout.max_num_seqs = 128
    config.rollout.max_prompt_tokens = 56
    config.rollout.max_response_tokens = 96
    return config
