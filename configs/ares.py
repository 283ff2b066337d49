"""ARES (https://arxiv.org/abs/2510.08457): Qwen2.5-VL-7B on problems with and without images.

python -m examples.prepare_data ares --out=data/ares
python -m jaxrl.launch --config=configs/ares.py --workdir=runs/ares

Needs models/Qwen2.5-VL-7B-Instruct. The problems are ViRL39K, of which 500 are held out. The mesh
is one host with eight 80 GiB devices (docs/plan.md); the paper used eight hosts. Prompts that are
too long with their images are dropped. configs/ares_small.py trains the same method on a laptop.

Hyperparameters are as published, except 500 steps (paper: 50 epochs) and a bootstrap pass over 512
tasks (paper: all; released code: none). Other differences:

- Training starts from the public instruct model, without the paper's cold start.
- KL budgets and token-level KL weights follow the paper and scale the configured coefficient. The
  released code repeatedly multiplies one coefficient per difficulty.
- The entropy window of a token starts after it, as in the code. The paper includes the token.
- Every token may start a window. The code requires a trigger word, which is an option here.
- The reward's coefficient is updated with the previous batch's target. The code updates the target
  first.
- Groups are filtered by accuracy. The code filters by reward, which lets all-wrong groups pass.
- Entropies are those of the full distribution. The code estimates them from ten tokens.
- Videos are not supported. The prompt's wording and the sampler's sizes are ours.
"""

from ml_collections import ConfigDict

from configs.dapo import TEMPLATE
from jaxrl.config import default_config


def set_method(config: ConfigDict) -> None:
    """Set GRPO with ARES's entropy reward, KL budgets, and a weaker KL term at high entropy."""
    config.rollout.temperature = 1.0
    config.rollout.top_p = 0.99
    config.filter.name = "range"
    config.filter.range.low = 0.01
    config.filter.range.high = 0.99
    config.filter.max_batches = 20
    config.shaping.entropy_reward = True
    config.shaping.entropy_window = 4
    config.shaping.entropy_percentile = 95.0
    config.shaping.alpha_init = 0.5
    config.advantage.name = "grpo"
    config.loss.clip_low = 0.2
    config.loss.clip_high = 0.3
    config.loss.clip.dual_clip = 3.0
    config.loss.aggregation = "token-mean"
    config.kl.coef = 0.01
    config.kl.estimator = "k3"
    config.kl.anchor = "ref"
    config.kl.controller = "budget"
    config.kl.low_factor = 0.5


def get_config() -> ConfigDict:
    config = default_config().lock()
    set_method(config)
    config.num_steps = 500
    config.model.path = "models/Qwen2.5-VL-7B-Instruct"
    config.model.dtype = "bfloat16"
    config.mesh.data = 1
    config.mesh.fsdp = 4
    config.mesh.tensor = 2  # two devices share the heads of a long row
    config.env.name = "math"
    config.tasks.train.source = "data/ares/train.jsonl"
    config.tasks.eval.source = "data/ares/test.jsonl"
    config.prompt.template = TEMPLATE
    config.images.min_pixels = 262_144
    config.images.max_pixels = 4_194_304

    config.rollout.tasks_per_step = 512
    config.rollout.group_size = 8
    config.rollout.max_prompt_tokens = 4096
    config.rollout.max_response_tokens = 8192
    config.rollout.max_total_tokens = 12288
    config.rollout.overlong_prompts = "drop"
    config.rollout.max_num_seqs = 256
    config.shaping.bootstrap_tasks = 512

    config.optimizer.lr = 1e-6
    config.optimizer.weight_decay = 0.01
    config.optimizer.num_minibatches = 4
    config.optimizer.micro_rows = 0

    config.eval.every_steps = 5
    config.eval.temperature = 0.5
    config.eval.top_p = 0.99
    config.eval.suites = ("sampled",)
    config.eval.final_suites = ("sampled", "greedy")
    config.checkpoint.every_steps = 5
    return config
