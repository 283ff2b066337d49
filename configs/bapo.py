"""BAPO (https://arxiv.org/abs/2601.11037): Qwen2.5-7B-Instruct learns to search, on 8 devices.

python -m examples.prepare_data bapo --out=data/bapo
python -m examples.prepare_data wiki18 --out=data/wiki18
python -m jaxrl.launch --config=configs/bapo.py --workdir=runs/bapo

Needs models/Qwen2.5-7B-Instruct and models/e5-base-v2. Evaluations use up to 200 questions each of
HotpotQA, 2WikiMultiHopQA, MuSiQue and Bamboogle. E5 retrieves five passages, as published. The
Python tool is an extra: pip install -e '.[python-tool]'. configs/bapo_small.py trains the same
method on a laptop.

Hyperparameters are as published, except the abstention rate at which the stage gate withholds the
bonus: 0.1 instead of 0.05. Other differences:

- Groups are resampled up to twice, as in the paper. The code's loop ends one attempt earlier.
- Groups are resampled in both stages; the paper resamples in the late one (filter.resample_early
  set to False).
- Evaluations below the best are counted over the run, as in the code. The best starts at minus
  infinity, not 0.
- The sample gate requires at least n/2 distinct answers; the paper says "more than 3 of 8".
- Groups are formed by task, not from eight consecutive trajectories.
- If no calls are left, the response ends. The code appends an end-of-turn id and trains on it.
- Python runs in a sandbox without packages and with a fixed clock.
- Episodes with a failed search are excluded, not scored.
- The length of search results, the prompt's wording and the sampler's sizes are ours.
"""

from ml_collections import ConfigDict

from configs.search_r1 import set_retriever
from jaxrl.config import default_config

SYSTEM = """\
You answer questions with the help of a search engine. Think inside <think> and </think> first, \
and again after every result. To search, write <search> your query </search>; the result follows \
inside <result> and </result>. To calculate, write <python> print(...) </python>; what it prints \
follows in the same way. When you are done, write your final answer inside <answer> and \
</answer>, the answer itself in a box: <answer> The answer is \\boxed{answer} </answer>. If, after \
an honest search, you cannot find out what is asked, say so: \
<answer> \\boxed{I DON'T KNOW} </answer>."""


def set_environment(config: ConfigDict) -> None:
    """Set BAPO's tags, tools and reward."""
    config.env.search.protocol = "bapo"
    config.env.search.tools = ("python",)
    config.reward.weights = {"bapo": 1.0}  # F1, or -1 for a malformed response
    config.reward.correct = "bapo"


def set_method(config: ConfigDict) -> None:
    """Set GRPO with BAPO's reward for abstentions, its two gates, and resampling."""
    config.shaping.boundary_aware = True
    config.shaping.stage_level = True
    config.shaping.sample_level = True
    config.shaping.abstention_bonus = 0.5
    config.shaping.abstention_rate = 0.1
    config.shaping.stage_tolerance = 5
    config.filter.resample_attempts = 2
    config.rollout.temperature = 1.0
    config.advantage.name = "grpo"
    config.loss.clip_low = 0.1
    config.loss.clip_high = 0.1
    config.kl.coef = 0.001
    config.kl.estimator = "k3"
    config.kl.anchor = "ref"
    config.eval.every_steps = 1  # a low accuracy counts toward the late stage
    config.eval.suites = ("greedy",)
    config.eval.best_metric = "val-core/all/exact_match/greedy"


def get_config() -> ConfigDict:
    config = default_config().lock()
    set_environment(config)
    set_method(config)
    config.filter.resample_early = True
    config.num_steps = 156  # two epochs
    config.model.path = "models/Qwen2.5-7B-Instruct"
    config.model.dtype = "bfloat16"
    config.mesh.data = 1
    config.mesh.fsdp = 8
    config.tasks.train.source = "data/bapo/train.jsonl"
    config.tasks.eval.source = "data/bapo/eval.jsonl"
    config.prompt.system = SYSTEM
    set_retriever(config)
    config.search.dense.topk = 5
    config.rollout.max_observation_tokens = 2048

    config.rollout.tasks_per_step = 64
    config.rollout.group_size = 8
    config.rollout.max_turns = 3
    config.rollout.max_prompt_tokens = 1536
    config.rollout.max_response_tokens = 8192
    config.rollout.max_total_tokens = 1536 + 8192  # search results count as response
    config.rollout.max_num_seqs = 64

    config.optimizer.lr = 1e-6
    config.optimizer.num_minibatches = 4
    config.optimizer.micro_rows = 0
    config.checkpoint.every_steps = 10
    return config
