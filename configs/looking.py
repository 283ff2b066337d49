"""Train a small Qwen2.5-VL to answer questions about images, on a laptop CPU: `make looking`.

python -m examples.looking_world --out=data/looking
python -m jaxrl.launch --config=configs/looking.py --workdir=runs/looking

To use another data folder, append it: --config=configs/looking.py:data/other
"""

from ml_collections import ConfigDict

from jaxrl.config import default_config


def get_config(world: str = "data/looking") -> ConfigDict:
    config = default_config().lock()
    config.stages = ("sft", "train", "evaluate")
    config.num_steps = 150
    config.model.path = f"{world}/model"
    config.model.remat = "none"  # a small model has memory to spare
    config.env.name = "math"
    config.tasks.train.source = f"{world}/questions_train.jsonl"
    config.tasks.eval.source = f"{world}/questions_eval.jsonl"

    config.sft.source = f"{world}/demonstrations.jsonl"
    config.sft.num_steps = 500
    config.sft.batch_size = 32
    config.sft.optimizer.lr = 3e-3
    config.sft.optimizer.warmup_steps = 20
    config.sft.optimizer.schedule = "cosine"
    config.sft.optimizer.final_lr_fraction = 0.1
    config.sft.optimizer.beta2 = 0.98
    config.sft.optimizer.micro_rows = 32

    config.rollout.tasks_per_step = 32
    config.rollout.group_size = 8
    config.rollout.max_prompt_tokens = 24
    config.rollout.max_response_tokens = 10
    config.rollout.max_total_tokens = 34
    config.rollout.max_image_tokens = 4
    config.rollout.max_num_seqs = 256
    config.rollout.chunk_tokens = 8

    config.advantage.grpo.normalize_std = False
    config.loss.entropy_coef = 0.01
    config.optimizer.lr = 5e-4  # at 1e-3 it forgets the shapes
    config.optimizer.warmup_steps = 2
    config.optimizer.schedule = "cosine"  # at a constant rate, late steps undo progress
    config.optimizer.final_lr_fraction = 0.1
    config.optimizer.beta2 = 0.98
    config.optimizer.micro_rows = 32

    config.eval.final_suites = ("sampled", "greedy", "blank_images")
    config.checkpoint.every_steps = 1000
    return config
