"""DAPO (https://arxiv.org/abs/2503.14476): Qwen2.5-32B on its math set, eight 8-device hosts.

python -m examples.prepare_data dapo_math --out=data/dapo_math
python -m jaxrl.launch --config=configs/dapo.py --workdir=runs/dapo

Needs models/Qwen2.5-32B. configs/dapo_small.py trains the same method on a
laptop. Hyperparameters are those of the published run, including its warm-up of 10 rollouts
(paper: 20). Differences: answers are compared by value, not as normalized text; trajectories
without sampled tokens are excluded from means, where the code divides by zero; the mesh has 64
devices instead of 128 H20. The number of steps, the prompt's wording and the sampler's sizes are
ours.

The argument selects one of three published runs, such as --config=configs/dapo.py:early. Their
published scores on AIME 2024 are means of 32 samples:

full                 the complete method, the default: 52%
no_dynamic_sampling  also trains on all-correct and all-wrong groups: 50%
early                in addition, averages tokens within each response first: 44%
"""

from typing import Any

from ml_collections import ConfigDict

from jaxrl.config import default_config

TEMPLATE = """\
Work through the mathematical problem below step by step. End with a line of the form \
"Answer: X", where X is the result and nothing else stands on that line.

{question}"""


EVERY_GROUP = {"filter.name": "none", "filter.tasks_per_batch": 0}
SETUPS: dict[str, dict[str, Any]] = {
    "full": {},
    "no_dynamic_sampling": EVERY_GROUP,
    "early": {**EVERY_GROUP, "loss.aggregation": "seq-mean-token-mean"},
}
"""Changes to the config for each published run."""


def set_environment(config: ConfigDict) -> None:
    """Reward the last `Answer:` line with 1 if it is correct, else -1."""
    config.env.name = "math"
    config.reward.weights = {"math": 1.0}
    config.reward.correct = "math"


def set_method(config: ConfigDict) -> None:
    """Set clip-higher, dynamic sampling, token-level loss and overlong shaping, without KL."""
    config.rollout.temperature = 1.0
    config.filter.name = "varied"
    config.filter.key = "acc"
    config.filter.max_batches = 10
    config.advantage.name = "grpo"
    config.loss.clip_low = 0.2
    config.loss.clip_high = 0.28
    config.loss.clip.dual_clip = 10.0
    config.loss.aggregation = "token-mean"
    config.loss.entropy_coef = 0.0
    config.shaping.overlong_factor = 1.0
    config.kl.coef = 0.0


def get_config(setup: str = "full") -> ConfigDict:
    if setup not in SETUPS:
        raise ValueError(f"there is no setup {setup!r}; expected one of {', '.join(SETUPS)}.")
    config = default_config().lock()
    set_environment(config)
    set_method(config)
    config.num_steps = 320
    config.model.path = "models/Qwen2.5-32B"
    config.model.dtype = "bfloat16"
    config.mesh.data = 1
    config.mesh.fsdp = 8
    config.mesh.tensor = 8  # one host shares the heads of a row of 22528 tokens
    config.tasks.train.source = "data/dapo_math/train.jsonl"
    config.tasks.eval.source = "data/dapo_math/aime24.jsonl"
    config.prompt.template = TEMPLATE

    config.rollout.tasks_per_step = 512
    config.filter.tasks_per_batch = 1536
    config.rollout.group_size = 16
    config.rollout.max_prompt_tokens = 2048
    config.rollout.overlong_prompts = "truncate_left"
    config.rollout.max_response_tokens = 20480
    config.rollout.max_total_tokens = 22528
    config.rollout.max_num_seqs = 256
    config.shaping.overlong_buffer = 4096

    config.optimizer.lr = 1e-6
    config.optimizer.weight_decay = 0.1
    config.optimizer.grad_clip = 1.0
    config.optimizer.num_minibatches = 16
    config.optimizer.warmup_steps = 160  # 10 rollouts
    config.optimizer.micro_rows = 0

    config.eval.every_steps = 5
    config.eval.suites = ("sampled",)
    config.eval.final_suites = ("sampled",)
    config.eval.samples = 32
    config.eval.top_p = 0.7
    config.eval.best_metric = "val-core/all/exact_match/mean@32"
    config.checkpoint.every_steps = 5
    config.update_from_flattened_dict(SETUPS[setup])
    return config
