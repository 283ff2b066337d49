"""ARES (https://arxiv.org/abs/2510.08457): Qwen2.5-VL-7B on pictures and text.

python -m jaxrl.launch --config=configs/ares.py --workdir=runs/ares

Bring the model as models/Qwen2.5-VL-7B-Instruct and verifiable problems, with images or without, as
data/ares/train.jsonl and test.jsonl; docs/data.md has the formats. The tower is trained with the
rest; --config.model.freeze_tower freezes it. The mesh is that of one host of eight devices of
80 GiB, which has room for prompts that are nothing but image (docs/plan.md); theirs were eight.
Problems whose prompts are too long once their images are counted are left out.
configs/ares_small.py trains the same method on a laptop. Hyper-parameters are the published ones
but for two: 500 steps (the paper: 50 epochs), and the pass before the first step, which goes over
all tasks in the paper, over 512 here, since it holds all of their trajectories, and is not in the
released code. What else differs:

- The paper trains a model after a cold start of its own; here it is the instructed one that is
  public. A list of demonstrations in config.sft.source, and the stage sft, put one before it.
- The KL budgets are the paper's, with token weights, on the configured coefficient; the released
  code moves one coefficient for each difficulty, and compounds it.
- The window entropy of a token is that of those after it, as in the code; the paper counts it too.
- Every token may begin a window; the code asks for a list of trigger words, here an option.
- The reward's coefficient follows the target of the batch before; the code moves the target first.
- Groups are filtered by accuracy; the code filters by a reward that wrong groups pass.
- Videos are not read. The prompt's words and the sizes of the sampler are ours.
"""

from ml_collections import ConfigDict

from configs.dapo import TEMPLATE
from jaxrl.config import default_config


def set_method(config: ConfigDict) -> None:
    """An entropy reward by difficulty, a looser KL term where the policy wavers, KL budgets."""
    config.rollout.temperature = 1.0
    config.rollout.top_p = 0.99
    config.filter.name = "accuracy_range"
    config.filter.accuracy_range.low = 0.01
    config.filter.accuracy_range.high = 0.99
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
