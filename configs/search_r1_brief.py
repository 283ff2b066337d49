"""Search-R1 from a shorter description: groups of two, four updates per batch, one device.

python -m examples.prepare_data nq_hotpotqa --out=data/nq_hotpotqa
python -m examples.prepare_data wiki18 --out=data/wiki18
python -m jaxrl.launch --config=configs/search_r1_brief.py --workdir=runs/search_r1_brief

Differences from the paper (configs/search_r1.py): two answers per question, four updates on each
batch of one question, a KL penalty against the policy before those updates, and rewards for the
format and for similar answers. Needs models/Qwen2.5-0.5B-Instruct. The description does not name a
search engine; this config uses BM25. The exact-match bonus replaces the similarity reward. There is
no retry hint. The number of steps and all lengths except the 500 sampled tokens are ours.
"""

from ml_collections import ConfigDict

from jaxrl.config import default_config

SYSTEM = """\
Answer the question of the user. Think inside <think> and </think> where that helps. Where you \
lack knowledge, write a query as <search> query </search>; what is found is given to you between \
<information> and </information>, and you may search again. End with nothing but the answer inside \
<answer> and </answer>. If nothing relevant can be found, answer 未找到相关内容."""

EXAMPLES = (
    {"role": "user", "content": "How many legs does a spider have?"},
    {"role": "assistant", "content": "<think>I know this.</think><answer>eight</answer>"},
    {"role": "user", "content": "Who designed the bridge at Avington?"},
    {
        "role": "assistant",
        "content": "<think>I do not know this bridge.</think>"
        "<search>bridge at Avington designer</search>\n\n"
        "<information>Doc 1(Title: Avington Bridge) The bridge at Avington was designed by Ada "
        "Kerr.</information>\n\n<answer>Ada Kerr</answer>",
    },
)


def set_method(config: ConfigDict) -> None:
    """Set GRPO with four updates per batch and a KL penalty against the policy before them."""
    config.reward.weights = {"format": 1.0, "answer": 1.0}
    config.reward.correct = "answer"
    config.env.search.search_r1.format_reward = 0.5
    config.env.search.search_r1.format_failure = -1.0
    config.env.search.search_r1.answer_reward = 1.0
    config.env.search.search_r1.exact_match_bonus = 2.0
    config.env.search.search_r1.not_found = 0.5
    config.rollout.group_size = 2
    config.rollout.temperature = 1.0
    config.advantage.name = "grpo"
    config.advantage.grpo.ddof = 0
    config.advantage.grpo.epsilon = 1e-8
    config.loss.clip_low = 0.2
    config.loss.clip_high = 0.2
    config.loss.aggregation = "seq-mean-token-mean"
    config.kl.coef = 0.1
    config.kl.estimator = "k3"
    config.kl.anchor = "old"
    config.optimizer.num_epochs = 4
    config.optimizer.grad_clip = 0.5


def get_config() -> ConfigDict:
    config = default_config().lock()
    set_method(config)
    config.num_steps = 1000
    config.model.path = "models/Qwen2.5-0.5B-Instruct"
    config.model.dtype = "bfloat16"
    config.mesh.data = 1
    config.tasks.train.source = "data/nq_hotpotqa/train.jsonl"
    config.tasks.eval.source = "data/nq_hotpotqa/test.jsonl"
    config.prompt.system = SYSTEM
    config.prompt.examples = EXAMPLES
    config.search.local.corpus = "data/wiki18/corpus.jsonl"

    config.rollout.tasks_per_step = 1
    config.rollout.max_prompt_tokens = 1024
    config.rollout.max_response_tokens = 500
    config.rollout.max_total_tokens = 4096
    config.rollout.max_num_seqs = 32  # training uses two; evaluations use all

    config.optimizer.lr = 1e-5
    config.optimizer.micro_rows = 0

    config.eval.every_steps = 250
    config.eval.max_tasks = 500
    config.checkpoint.every_steps = 250
    return config
