"""Pass@k, then pass@1 training (https://arxiv.org/abs/2508.10751): Qwen2.5-7B-Instruct, 8 devices.

python -m examples.prepare_data enigmata --out=data/enigmata
python -m jaxrl.launch --config=configs/passk.py --workdir=runs/passk

Needs models/Qwen2.5-7B-Instruct. configs/passk_small.py trains the same method on a laptop.
Hyperparameters are as published. As in the paper, training ends with pass@1, here in the same run:
k falls from 4 to 1, which is GRPO. Differences: correctness is a boolean, where the code compares
rewards with 1 and 0; groups with fewer than k wrong answers have zero advantages, where the code
divides by zero; only puzzles with one-line solutions are used. The number of steps, the lengths,
the prompt's wording and the sampler's sizes are ours.
"""

from ml_collections import ConfigDict

from configs.dapo import TEMPLATE
from jaxrl.config import default_config


def set_method(config: ConfigDict) -> None:
    """Set closed-form pass@k advantages with k = 4."""
    config.rollout.temperature = 1.0
    config.advantage.name = "pass_at_k"
    config.advantage.pass_at_k.k = 4
    config.loss.clip_low = 0.2
    config.loss.clip_high = 0.28
    config.loss.aggregation = "token-mean"
    config.kl.coef = 0.0


def get_config() -> ConfigDict:
    config = default_config().lock()
    set_method(config)
    config.num_steps = 300
    config.advantage.pass_at_k.k_schedule = ((0, 4), (200, 1))
    config.model.path = "models/Qwen2.5-7B-Instruct"
    config.model.dtype = "bfloat16"
    config.mesh.data = 1
    config.mesh.fsdp = 4
    config.mesh.tensor = 2  # two devices share the heads of a long row
    config.env.name = "math"
    config.tasks.train.source = "data/enigmata/train.jsonl"
    config.tasks.eval.source = "data/enigmata/test.jsonl"
    config.prompt.template = TEMPLATE

    config.rollout.tasks_per_step = 128
    config.rollout.group_size = 32
    config.rollout.max_prompt_tokens = 4096
    config.rollout.max_response_tokens = 8192
    config.rollout.max_total_tokens = 12288
    config.rollout.max_num_seqs = 256

    config.optimizer.lr = 1e-6
    config.optimizer.warmup_steps = 10
    config.optimizer.micro_rows = 0

    config.eval.every_steps = 10
    config.eval.suites = ("sampled",)
    config.eval.final_suites = ("sampled", "greedy")
    config.eval.samples = 8
    config.eval.best_metric = "val-core/all/exact_match/mean@8"
    config.checkpoint.every_steps = 10
    return config
