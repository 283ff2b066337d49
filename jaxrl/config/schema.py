"""Definitions of all configuration keys: defaults, meanings, constraints and restart rules.

Value checks, `default_config()`, the comparison on resume and the tables in docs/configuration.md
derive from `KEYS`. Extras define additional keys in `extras/*/keys.py`. Those files and
`jaxrl/builders/validation.py` define the cross-key rules.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from jaxrl.config.keys import (
    CORPUS,
    DTYPES,
    EVALUATION,
    FILE,
    FREE,
    MODEL,
    REPLAY,
    RESULTS,
    TRAINING,
    Key,
    are_nonempty_strings,
    is_finite,
    load_extra_keys,
)
from jaxrl.utils.json_io import read_object

EXTRA_SECTIONS = {
    "model.lora": "lora",
    "images": "vision",
    "policy.openai": "endpoints",
    "env.agents": "serve",
    "env.search.mcp": "mcp",
    "env.search.python": "sandbox",
    "search.web": "web_search",
    "search.dense": "dense",
    "search.hybrid": "dense",
    "reward.math_verify": "symbolic_math",
    "loss.dppo": "stability",
    "loss.term.llds": "stability",
    "loss.token_filter.off_policy": "stability",
    "filter.unanswerable": "audit",
    "watch.sentinel": "sentinel",
}
"""Folder in `extras/` by the section or key that it defines."""

EXTRA_KEYS = {folder: load_extra_keys(folder) for folder in dict.fromkeys(EXTRA_SECTIONS.values())}
"""Keys and rules by folder in `extras/`; empty for a missing folder."""


def _get_extra_keys(section: str) -> dict[str, Key]:
    keys = EXTRA_KEYS[EXTRA_SECTIONS[section]].keys
    return {name: key for name, key in keys.items() if f"{name}.".startswith(f"{section}.")}


def find_missing_extra(key: str) -> str:
    """Return the folder of the missing extra that defines a key or section; "" if none does."""
    folders = [f for section, f in EXTRA_SECTIONS.items() if f"{key}.".startswith(f"{section}.")]
    return next((folder for folder in folders if not EXTRA_KEYS[folder].keys), "")


EXPERTS = ("auto", "xla", "mosaic_gpu", "triton", "megablox")
ATTENTION = ("auto", "xla", "mosaic_gpu", "triton", "mosaic")
KL_CONTROLLERS = ("fixed", "adaptive", "log", "budget")
LOCAL_MODEL = "model"
SUITES = ("sampled", "greedy", "empty_search", "random_search", "blank_images")

MIN_TEMPERATURE = 1e-3
"""Minimum temperature. At lower values, sampling is practically greedy, and logits may overflow."""


def _are_messages(values: tuple[Any, ...]) -> bool:
    return all(isinstance(item, dict) and set(item) == {"role", "content"} for item in values)


def _are_mappings(values: dict[str, Any]) -> bool:
    return all(isinstance(item, dict) for item in values.values())


def _is_k_schedule(pairs: tuple[Any, ...]) -> bool:
    """Return True if all pairs are integers (step, k), k >= 1, and steps increase from 0."""
    if not all(isinstance(item, tuple) and [type(n) for n in item] == [int, int] for item in pairs):
        return False
    steps = [step for step, _ in pairs]
    is_increasing = steps[:1] in ([], [0]) and steps == sorted(set(steps))
    return is_increasing and all(k >= 1 for _, k in pairs)


def _are_positive(values: tuple[Any, ...], count: int) -> bool:
    return len(values) == count and all(is_finite(value) and value > 0 for value in values)


_BY_DIFFICULTY = "three positive numbers, for easy, medium and hard tasks"


# Manually formatted table: key, default, meaning; then constraints and effect on a restart.
# fmt: off
def _define_optimizer_keys(section: str) -> dict[str, Key]:
    """Return the optimizer keys of the SFT or RL section."""
    return {
        f"{section}.lr": Key(1e-6, "Peak learning rate of AdamW.", at_least=0),
        f"{section}.warmup_steps": Key(0, "Steps of linear warm-up; the first uses "
            "1 / `warmup_steps` of the peak.", at_least=0),
        f"{section}.schedule": Key("constant", "Learning rate after the warm-up: `constant`, "
            "`linear`, `cosine`, or a dotted name.", names_code=True),
        f"{section}.final_lr_fraction": Key(0.0, "Final learning rate of `linear` and "
            "`cosine`, as a fraction of the peak.", at_least=0, at_most=1),
        f"{section}.weight_decay": Key(0.01, "Decoupled weight decay of every parameter.",
            at_least=0),
        f"{section}.beta1": Key(0.9, "AdamW's beta1.", at_least=0, below=1),
        f"{section}.beta2": Key(0.999, "AdamW's beta2.", at_least=0, below=1),
        f"{section}.epsilon": Key(1e-8, "AdamW's epsilon.", above=0),
        f"{section}.grad_clip": Key(1.0, "Global norm to which gradients are clipped. 0: none.",
            at_least=0),
        # No key for the second moment: with beta2 = 0.999, bfloat16 is too coarse for its updates.
        f"{section}.moments_dtype": Key("float32", "Dtype of AdamW's first moment. The second "
            "moment is float32.", one_of=DTYPES),
        f"{section}.offload": Key(False, "Keep both moments in host memory between updates.",
            restart=FREE),
        f"{section}.micro_rows": Key(8, "Maximum rows per micro-batch; a multiple of `data` × "
            "`fsdp` × `expert`. 0: as many as fit; on a CPU, two rows or 512 tokens.",
            at_least=0, restart=FREE),
    }


def _define_task_keys(name: str, split: str) -> dict[str, Key]:
    """Return the keys for the training tasks or the held-out tasks."""
    return {
        f"tasks.{name}.source": Key("", "Training tasks: a file, a pattern with `*`, a folder, "
            "`hf://datasets/org/name/file`, or the name of a generated data set."),
        f"tasks.{name}.format": Key("", "`jsonl`, `csv`, `parquet` (also verl's), `tfds`, `hf` "
            "(`save_to_disk`; extra `datasets`), `reasoning_gym` (extra `reasoning-gym`), or the "
            "dotted name of your reader. Empty: inferred."),
        f"tasks.{name}.split": Key(split, "Split of `tfds` and `hf`, or a slice of one for "
            "`tfds`: `train[:90%]`."),
        f"tasks.{name}.settings": Key({}, "Keyword arguments of the reader, such as "
            "`{'delimiter': ';'}` for `csv`.", example=1, is_nested=True),
        f"tasks.{name}.columns": Key({}, "Renamed columns: `{'problem': 'question'}`. An empty "
            "name drops a column.", example="question"),
        f"tasks.{name}.data_source": Key("", "Data source of all tasks, and prefix of their ids. "
            "Empty: the tasks' own."),
        f"tasks.{name}.sources": Key((), "Several sources: mappings with these keys and, "
            "for training, `weight` (default 1), such as `({'source': 'a.csv', 'weight': 2.0}, "
            "{'source': 'b.jsonl'})`."),
    }


def _link_descriptions(section: str, keys: dict[str, Key]) -> dict[str, Key]:
    """Replace the description of each key with a reference to the same key of another section."""
    return {
        name: replace(key, meaning=f"As `{section}.{name.rpartition('.')[2]}`.")
        for name, key in keys.items()
    }


STAGES = ("sft", "train", "evaluate")
"""Stages of a run, in order."""

_ENTRIES: dict[str, Key] = {
    "stages": Key(("train", "evaluate"), "Stages of the run, in this order: `sft`, `train`, "
        "`evaluate`.", some_of=STAGES,
        is_valid=lambda v: v and v == tuple(sorted(set(v), key=STAGES.index)),
        expected=f"each at most once, in the order of {STAGES}", restart=FREE),
    "seed": Key(0, "Random seed of task order and samples.", at_least=0, below=2**31),
    "num_steps": Key(100, "Steps of the `train` stage. 0: computed from `num_epochs`.", at_least=0,
        restart=TRAINING),
    "num_epochs": Key(0, "Passes over the training tasks, with `num_steps=0`. The number of steps "
        "is computed at the start.", at_least=0, restart=TRAINING),
    "compilation_cache": Key("", "Folder of JAX's compilation cache. Empty: "
        "`$XDG_CACHE_HOME/jaxrl/programs`; `off`: none.", restart=FREE),
    # ---------------------------------------------------------------------------- model
    "model.path": Key("", "Folder in Hugging Face format, or `hf://org/name`.", holds=MODEL,
        written_to="export"),
    "model.architecture": Key("", "Architecture: a name, or the dotted name of its class. Empty: "
        "`model_type` in `config.json`.", group="jaxrl.architectures", names_code=True),
    "model.dtype": Key("float32", "Dtype of activations, matrix products and KV cache. Trained "
        "weights stay float32.", one_of=DTYPES),
    "model.head_dtype": Key("", "Dtype of the output layer's operands, in sampler and trainer. "
        "Empty: `model.dtype`. Logits are always float32.", one_of=("", "float32")),
    "model.eos_tokens": Key((), "Tokens that end a message, such as `('<|im_end|>',)`, in "
        "addition to `eos_token` in `tokenizer_config.json` and `eos_token_id` in "
        "`generation_config.json`.", is_valid=are_nonempty_strings,
        expected="a tuple of texts, such as ('<|im_end|>',)"),
    "model.attention": Key("auto", "Attention kernels: `xla` (all devices), `mosaic_gpu` "
        "(Hopper), `triton` (GPUs), `mosaic` (TPUs), or `auto`: the first that passes its "
        "self-test.", one_of=ATTENTION, restart=FREE),
    "model.experts": Key("auto", "Kernels for experts: `xla` (all devices), `mosaic_gpu` "
        "(Hopper), `triton` (GPUs), `megablox` (TPUs), or `auto`: the first that passes its "
        "self-test.",
        one_of=EXPERTS, restart=FREE),
    "model.balance_coef": Key(0.0, "Coefficient of the load-balancing loss of experts, in both "
        "stages. 0: none.", at_least=0),
    "model.replay": Key(False, "Replay the sampler's routing in training: send each token to the "
        "experts that sampled it."),
    "model.remat": Key("full", "What the backward pass recomputes. `full`: each layer; `names`: "
        "all but matrix products and attention; `dots`: all but matrix products; `none`: "
        "nothing; `offload`: like `full`, with layer inputs and attention results in host memory.",
        one_of=("none", "dots", "names", "full", "offload"), restart=FREE),
    "model.scan_layers": Key(True, "Compile one layer and reuse it. False compiles each layer, "
        "which takes longer. The sampler always compiles each layer on a CPU, and on a GPU "
        "without an adapter.", restart=FREE),
    "model.freeze_tower": Key(False, "Freeze the vision tower and its merger."),
    "model.logits_chunk_tokens": Key(2048, "Tokens whose logits the update keeps in memory at "
        "once.", above=0, restart=FREE),
    **_get_extra_keys("model.lora"),
    **_get_extra_keys("images"),
    # --------------------------------------------------------------------------- policy
    "policy.name": Key(LOCAL_MODEL, "`model`: the model of `model.path`; `openai`: a model behind "
        "an OpenAI-compatible endpoint, which is evaluated, not trained. `model.path` then "
        "provides config, tokenizer and image processor.",
        one_of=(LOCAL_MODEL, "openai")),
    **_get_extra_keys("policy.openai"),
    # ----------------------------------------------------------------------------- mesh
    "mesh.data": Key(-1, "Devices that split rows and replicate weights. -1: all remaining."),
    "mesh.fsdp": Key(1, "Devices that split rows and weights."),
    "mesh.context": Key(1, "Devices that split each packed row (for long contexts) and weights. "
        "The sampler splits trajectories over them."),
    "mesh.expert": Key(1, "Devices that split rows, experts and other weights."),
    "mesh.tensor": Key(1, "Devices that split heads and vocabulary."),
    "mesh.rollout_devices": Key(0, "Devices of each process that only sample, with "
        "`rollout.async_level`; the others train. A multiple of `expert` × `tensor`. 0: all do "
        "both.",
        at_least=0),
    # ---------------------------------------------------------------- tasks and prompts
    **_define_task_keys("train", "train"),
    **_link_descriptions("tasks.train", _define_task_keys("eval", "test")),
    "tasks.eval.holdout": Key(0.0, "Held-out tasks from `tasks.train` instead: a fraction below "
        "1, or a count. `seed` and the questions select them.", at_least=0,
        is_valid=lambda v: v < 1 or v == int(v), expected="a fraction below 1, or a whole number"),
    "prompt.system": Key("", "System message. Empty: none, not even the template's own."),
    "prompt.template": Key("{question}", "User message with the question.",
        is_valid=lambda v: "{question}" in v, expected="text that contains {question}"),
    "prompt.template_file": Key("", "Jinja file that replaces `template`, rendered "
        "with `question` and the task's metadata."),
    "prompt.examples": Key((), "Few-shot messages (`{'role', 'content'}`) between `system` "
        "and `template`.", is_valid=_are_messages, expected="messages with 'role' and 'content'"),
    "prompt.chat_template_kwargs": Key({}, "Variables of the model's chat template, such as "
        "`{'enable_thinking': False}`.", example=False),
    # --------------------------------------------------------------------- environments
    "environments": Key({}, "Several environments, by name: `weight` (default 1), and keys of "
        "`tasks`, `prompt`, `env`, `search`, `reward`, and `rollout.max_turns`, "
        "`rollout.max_calls`, `rollout.max_cost`, `sft.source`.",
        example={"weight": 0.5}, is_nested=True, restart=TRAINING),
    "env.name": Key("search", "`search`, `math`, `agents` (extra `serve`), or the dotted name of "
        "your environment, such as `my_env.MyEnv`.",
        group="jaxrl.environments", names_code=True),
    "env.settings": Key({}, "Keyword arguments of your environment.", example=1,
        is_nested=True),
    "env.step_deadline_s": Key(600.0, "Seconds after which a call of the environment is "
        "abandoned and its episodes end in environment errors. 0: never.",
        at_least=0, restart=FREE),
    **_get_extra_keys("env.agents"),
    "env.search.protocol": Key("search_r1", "`search_r1` (`<information>`), `bapo` (`<result>`, "
        "`\\boxed{}`), `qwen` (tool calls of the chat template), or a dotted name.",
        names_code=True),
    "env.search.tools": Key((), "Tools in addition to search: `python`, a sandbox (extra "
        "`python-tool`), or dotted names of classes and functions (extra `tools`).",
        group="jaxrl.tools"),
    **_get_extra_keys("env.search.mcp"),
    "env.search.tool_deadline_s": Key(60.0, "Seconds per call of a function or MCP server.",
        above=0),
    **_get_extra_keys("env.search.python"),
    "env.search.search_r1.format_reward": Key(0.5, "Reward for a response that follows the "
        "protocol."),
    "env.search.search_r1.format_failure": Key(-1.0, "Reward for any other response."),
    "env.search.search_r1.answer_reward": Key(1.0, "Reward for an answer similar to an accepted "
        "answer."),
    "env.search.search_r1.exact_match_bonus": Key(2.0, "Reward for an exact match, instead of "
        "`answer_reward`."),
    "env.search.search_r1.not_found": Key(0.5, "Reward for the answer 未找到相关内容, \"no "
        "relevant content found\"."),
    "env.search.qwen.format_reward": Key(0.0, "Reward for a response that follows the protocol."),
    "env.search.qwen.format_failure": Key(-1.0, "Reward for any other response."),
    # --------------------------------------------------------------------------- search
    "search.engine": Key("local", "`local` (BM25), `dense` (vectors), `hybrid` (both), "
        "`http`, `web`, `google`, `mock`, `empty`, `none`, or a dotted name.",
        group="jaxrl.engines", names_code=True),
    "search.settings": Key({}, "Keyword arguments of your engine.", example=1,
        is_nested=True),
    # Layers around any engine; docs/search.md lists them in order.
    "search.cache_mib": Key(64.0, "MiB of results in the in-memory LRU cache. 0: none.",
        at_least=0, restart=FREE),
    "search.cache_ttl_s": Key(0.0, "Seconds for which a cached result is valid. 0: forever.",
        at_least=0, restart=FREE),
    "search.queries_per_second": Key(0.0, "Maximum queries per second; each query of a batch "
        "counts. 0: no limit.", at_least=0, restart=FREE),
    "search.max_concurrent": Key(0, "Maximum concurrent calls to the engine; a batch is one "
        "call. 0: the engine's limit.", at_least=0, restart=FREE),
    "search.deadline_s": Key(120.0, "Seconds after which a call to the engine fails.",
        above=0, restart=FREE),
    "search.retries": Key(3, "Retries of a query that fails while others succeed; after these, "
        "its episode is an environment error. During an outage, retries do not count.",
        at_least=0, restart=FREE),
    "search.backoff_s": Key(1.0, "Seconds before the first retry, doubled each time up to 30, ± "
        "25%. A server's `Retry-After` applies to all queries.",
        at_least=0, restart=FREE),
    "search.breaker_failures": Key(8, "Consecutive failures that open the circuit breaker. 0: "
        "never.",
        at_least=0, restart=FREE),
    "search.breaker_rest_s": Key(5.0, "Seconds until an open circuit breaker sends a trial query.",
        above=0, restart=FREE),
    "search.outage_deadline_s": Key(300.0, "Seconds without any answer after which the engine "
        "counts as down.", above=0, restart=FREE),
    "search.on_outage": Key("stop", "`stop`: save and exit with code 69; `empty`: episodes "
        "continue with expired cache entries or empty results and end in environment errors.",
        one_of=("stop", "empty"), restart=FREE),
    "search.replay": Key("off", "`record`: keep results on disk and reuse them; `only`: use "
        "recorded results without an engine; `off`: neither.",
        one_of=REPLAY, restart=FREE),
    "search.replay_folder": Key("", "Folder of the recording. Empty: `searches/` in the workdir.",
        restart=FREE),
    "search.local.corpus": Key("", "JSONL of documents: `id`, `title`, `text`.", required="a path",
        holds=CORPUS),
    "search.local.index": Key("", "Folder of the index. Empty: `index` next to the corpus."),
    "search.local.topk": Key(3, "Documents per query.", above=0),
    "search.http.url": Key("", "URL of the server, such as `http://127.0.0.1:8000/retrieve`.",
        required="the URL of a server, such as http://127.0.0.1:8000", restart=FREE),
    "search.http.protocol": Key("search_r1", "`search_r1` or `flashrag`.",
        one_of=("search_r1", "flashrag")),
    "search.http.topk": Key(3, "Documents per query.", above=0),
    "search.http.key_env": Key("", "Environment variable that holds a bearer token. Empty: none.",
        restart=FREE),
    "search.http.timeout_s": Key(30.0, "Seconds per request.",
        above=0, restart=FREE),
    "search.http.connections": Key(16, "Maximum concurrent requests.", above=0, restart=FREE),
    "search.http.batch_size": Key(64, "Maximum queries per request.", above=0, restart=FREE),
    "search.http.max_response_mib": Key(64.0, "Maximum size of a response in MiB; a larger "
        "response is a failure.", above=0, restart=FREE),
    "search.mock.documents": Key({}, "Text by keyword, such as `{'paris': 'Paris is in France.'}`.",
        example="Paris is in France."),
    "search.mock.path": Key("", "JSON file with such a mapping, instead of `documents`.",
        holds=FILE),
    **_get_extra_keys("search.web"),
    **_get_extra_keys("search.dense"),
    **_get_extra_keys("search.hybrid"),
    # --------------------------------------------------------------------------- reward
    "reward.weights": Key({"exact_match": 1.0}, "Weight of each reward part: the "
        "environment's parts, `math_verify` (extra `math`), `bleu`, `rouge_l` (`text-metrics`), "
        "judges, and your functions by dotted name.",
        example=1.0, group="jaxrl.rewards",
        is_valid=lambda v: all(map(is_finite, v.values())),
        expected="a finite number for each part"),
    "reward.settings": Key({}, "Keyword arguments of your functions, such as "
        "`{'my_reward.brevity': {'words': 50}}`.", example={}, is_nested=True,
        is_valid=_are_mappings, expected="names with mappings, such as {'name': {'setting': 50}}"),
    "reward.deadline_s": Key(600.0, "Seconds for all reward functions of a batch; unfinished "
        "episodes end in environment errors. 0: no limit, and synchronous functions run one by "
        "one in the main thread.", at_least=0, restart=FREE),
    "reward.correct": Key("exact_match", "Reward part that decides correctness: above 0 is "
        "correct."),
    "reward.judges": Key({}, "LLM judges by name, such as `{'helpful': {'url': "
        "'http://judge:8000/v1', 'model': 'judge', 'prompt': '..{response}..'}}`; all settings "
        "are in `jaxrl/extras/endpoints/judges.py`.", example={}, is_nested=True,
        is_valid=_are_mappings, expected="names with mappings, such as {'name': {'setting': 50}}"),
    **_get_extra_keys("reward.math_verify"),
    # -------------------------------------------------------------------------- shaping
    "shaping.overlong_buffer": Key(0, "Tokens before the limit over which the penalty grows. 0: "
        "off.", at_least=0),
    "shaping.overlong_max_tokens": Key(0, "Length limit, including tool text. 0: "
        "`rollout.max_response_tokens` in math; with tools, what `rollout.max_total_tokens` "
        "leaves after the longest prompt.", at_least=0),
    "shaping.overlong_factor": Key(1.0, "Penalty at the limit and beyond.", at_least=0),
    "shaping.boundary_aware": Key(False, "Reward \"I don't know\" in groups without a correct "
        "answer."),
    "shaping.abstention_bonus": Key(0.5, "Reward for an abstention.", at_least=0),
    "shaping.abstention_rate": Key(0.1, "Fraction of abstentions in a batch at which the "
        "early stage gives no bonus.", at_least=0, at_most=1),
    "shaping.stage_level": Key(True, "Use an early and a late stage; the late stage starts when "
        "evaluations stop improving."),
    "shaping.stage_tolerance": Key(5, "Evaluations below the best that the early stage "
        "tolerates, over the whole run.", at_least=0),
    "shaping.sample_level": Key(True, "In the late stage, give no bonus in groups whose answers "
        "vary widely."),
    "shaping.entropy_reward": Key(False, "Reward tokens of high entropy by difficulty (ARES)."),
    "shaping.centered_gain": Key(False, "Start gains at 0 instead of half their size."),
    "shaping.entropy_window": Key(4, "Tokens of an entropy window.", above=0),
    "shaping.entropy_percentile": Key(95.0, "Percentile of the windows of each trajectory; the "
        "median over the batch is the threshold.", at_least=0, at_most=100),
    "shaping.entropy_decay": Key(0.99, "Decay of the threshold's moving average.", at_least=0,
        at_most=1),
    "shaping.trigger_words": Key((), "Words that may begin a window. Empty: all tokens.",
        is_valid=lambda v: all(isinstance(word, str) and word.strip() for word in v),
        expected="a tuple of words"),
    "shaping.alpha_init": Key(0.5, "Initial coefficient of the entropy reward, by difficulty.",
        at_least=0),
    "shaping.alpha_step": Key(0.05, "Change of the coefficient per token from the "
        "target.", at_least=0),
    "shaping.alpha_max": Key(2.0, "Upper bound of the coefficient.", at_least=0),
    "shaping.min_accuracies": Key((2 / 3, 1 / 3), "Minimum accuracies of easy and medium tasks.",
        is_valid=lambda v: _are_positive(v, 2) and v[0] > v[1],
        expected="two positive numbers, the first the larger"),
    "shaping.margins": Key((0.15, 0.25, 0.35), "Distance from the target without a penalty, "
        "as a fraction of the target: easy, medium and hard tasks.",
        is_valid=lambda v: _are_positive(v, 3), expected=_BY_DIFFICULTY),
    "shaping.huber_knees": Key((2.0, 3.0, 4.0), "Tokens above which each penalty is linear.",
        is_valid=lambda v: _are_positive(v, 3), expected=_BY_DIFFICULTY),
    "shaping.sigmoid_temperatures": Key((2.0, 2.5, 3.0), "Temperature of each gain, in tokens.",
        is_valid=lambda v: _are_positive(v, 3), expected=_BY_DIFFICULTY),
    "shaping.bootstrap_tasks": Key(0, "Tasks rolled out before the first step to initialize "
        "these states. -1: all.", at_least=-1, expected="-1 (all) or more"),
    # -------------------------------------------------------------------------- rollout
    "rollout.tasks_per_step": Key(16, "Groups per step.", above=0, restart=TRAINING),
    "rollout.group_size": Key(8, "Trajectories per task.", above=0, restart=TRAINING),
    "rollout.temperature": Key(1.0, "Temperature of sampling and of the trained "
        "log-probabilities.", at_least=MIN_TEMPERATURE,
        expected=f"a number of at least {MIN_TEMPERATURE}; the suite 'greedy' is that of 0",
        restart=TRAINING),
    "rollout.top_p": Key(1.0, "Nucleus sampling probability. 1: off.",
        above=0, at_most=1, restart=TRAINING),
    "rollout.max_prompt_tokens": Key(1024, "Maximum length of a prompt in tokens.", above=0),
    "rollout.overlong_prompts": Key("refuse", "Longer prompts: `refuse` the run, `drop` the "
        "task, or `truncate_left`.", one_of=("refuse", "drop", "truncate_left")),
    "rollout.max_response_tokens": Key(512, "Maximum number of sampled tokens per trajectory, "
        "over all turns.", above=0),
    "rollout.max_total_tokens": Key(2048, "Maximum length of a trajectory in tokens: prompt, "
        "sampled tokens and observations.", above=0),
    "rollout.context.name": Key("none", "What happens when a context is full. `none`: the "
        "episode ends; `drop_observations`: it continues with all turns but without older "
        "observations; `last_turns`: with the newest turns.",
        one_of=("none", "drop_observations", "last_turns"),
        restart=TRAINING),
    "rollout.context.max_tokens": Key(0, "Maximum length of a context in tokens. "
        "`max_total_tokens` counts all contexts, with repeated tokens.", at_least=0,
        restart=TRAINING),
    "rollout.context.keep": Key(1, "Newest observations or turns that the next context keeps, if "
        "they fit.", above=0, restart=TRAINING),
    "rollout.context.turn_tokens": Key(64, "Tokens reserved for a turn; with fewer left, the next "
        "context starts.", above=0, restart=TRAINING),
    "rollout.max_image_tokens": Key(0, "Maximum number of image tokens per trajectory. 0: "
        "`max_total_tokens`, or `max_prompt_tokens` without tools.", at_least=0),
    "rollout.max_observation_tokens": Key(500, "Maximum length of an observation in tokens; a "
        "longer observation is truncated inside its tags.", above=0),
    "rollout.max_turns": Key(4, "Maximum number of turns that call tools. One more such turn "
        "ends the episode.", at_least=0),
    "rollout.max_calls": Key(0, "Maximum number of tool calls per trajectory. Additional calls get "
        "an error message. 0: no limit.", at_least=0),
    "rollout.max_cost": Key(0.0, "Maximum cost of a trajectory's calls at `ledger.prices`, each "
        "counted once. A call beyond it ends the episode. 0: no limit.", at_least=0),
    "rollout.max_num_seqs": Key(64, "Trajectories decoded concurrently, in total; a multiple of "
        "`data` × `fsdp` × `expert` × `context`.", above=0, restart=FREE),
    # The upper bound exceeds any device's memory, yet its size in bytes is an exact float.
    "rollout.cache_gib": Key(0.0, "GiB of KV cache per device. 0: what the memory plan leaves; on "
        "a CPU, room for `max_num_seqs` trajectories of full length.", at_least=0,
        at_most=2**20, restart=FREE),
    "rollout.chunk_tokens": Key(16, "Decoding steps per device call.",
        above=0, restart=FREE),
    "rollout.deterministic": Key(None, "True: observations are inserted after a fixed "
        "number of chunks, so runs are bit-identical. False: they are inserted on arrival, which "
        "hides slow tools and changes samples only by rounding. None: True on CPUs, False on "
        "accelerators.", restart=FREE),
    "rollout.observation_lag_chunks": Key(2, "Chunks between a turn's end and its reply, in a "
        "deterministic run. With 1, the device waits for the environment; with more, it decodes "
        "other rows in the meantime.",
        above=0, restart=FREE),
    "rollout.async_level": Key(0, "1: sample the next step's groups during the update, with the "
        "weights from before the update. 0: sample after the update.", one_of=(0, 1),
        expected="0 or 1", restart=TRAINING),
    "rollout.max_failed_steps": Key(3, "Consecutive batches in which every episode failed, after "
        "which the run exits with code 69. The run also exits if every episode of a final "
        "evaluation fails. 0: never.", at_least=0, restart=FREE),
    # --------------------------------------------------------------------------- filter
    "filter.name": Key("none", "`none`; `varied`: groups whose metric differs (dynamic "
        "sampling); `range`: groups whose mean metric is in a range (online filtering); or a "
        "dotted name.", names_code=True),
    "filter.settings": Key({}, "Keyword arguments of your filter.", example=1),
    "filter.key": Key("acc", "Metric of the filter: `acc`, correctness; `score`, reward before "
        "shaping; `seq_reward`, after shaping; `seq_final_reward`, minus the KL term; "
        "`response_length` or `mean_entropy`; or a reward part."),
    "filter.range.low": Key(0.01, "Lower bound, exclusive."),
    "filter.range.high": Key(0.99, "Upper bound, exclusive."),
    "filter.trajectories": Key("none", "Trajectories with a loss: `void_turns` removes those "
        "with a turn that neither calls a tool nor answers; or the dotted name of a function. "
        "Removed trajectories still count toward group statistics.",
        names_code=True),
    "filter.tasks_per_batch": Key(0, "Tasks drawn at a time until enough groups are kept. 0: "
        "`rollout.tasks_per_step`.", at_least=0),
    "filter.max_batches": Key(10, "Batches per step after which the run ends with an error. 0: "
        "no limit.",
        at_least=0, restart=FREE),
    "filter.carry_over": Key(False, "Keep surplus groups for the next step instead of dropping "
        "them."),
    "filter.unfinished_tasks": Key(0, "Tasks whose episodes may continue into the next step, so "
        "that no step waits for the slowest. Only complete groups are trained on.",
        at_least=0),
    "filter.resample_attempts": Key(0, "Resampling attempts for groups with neither a correct "
        "answer nor an abstention. 0: none.", at_least=0),
    "filter.resample_early": Key(False, "Also resample in the early stage."),
    "filter.skip_solved": Key(False, "Skip a task for the rest of the run once all its samples "
        "are correct and confident."),
    "filter.skip_entropy": Key(0.1, "Mean entropy in nats below which samples are confident.",
        at_least=0),
    **_get_extra_keys("filter.unanswerable"),
    # ----------------------------------------------------------------------- advantages
    "advantage.name": Key("grpo", "`grpo`, `rloo`, `reinforce_plus_plus`, `pass_at_k`, "
        "`pass_at_k_combination`, `pass_at_k_exceeding`, `pass_at_k_full_sampling`, "
        "`pass_at_k_bootstrap`, `pass_at_k_entropy_guided`, or a dotted name such as "
        "`my_estimator.estimate`.", names_code=True),
    "advantage.settings": Key({}, "Keyword arguments of your estimator.", example=1),
    "advantage.by_turn": Key(False, "True: a turn's tokens get the reward-to-go from that turn. "
        "False: all tokens get the total reward."),
    "advantage.turn_discount": Key(1.0, "Discount of later rewards per turn, with `by_turn`.",
        at_least=0, at_most=1),
    "advantage.grpo.normalize_std": Key(True, "Divide by the group's standard deviation."),
    "advantage.grpo.ddof": Key(1, "0: population standard deviation; 1: sample standard "
        "deviation.",
        one_of=(0, 1), expected="0 (population) or 1 (sample)"),
    "advantage.grpo.epsilon": Key(1e-6, "Added to the standard deviation.", at_least=0),
    "advantage.reinforce_plus_plus.baseline": Key(False, "Subtract the group's mean first."),
    "advantage.pass_at_k.k": Key(4, "k of pass@k and its variants.",
        above=0),
    "advantage.pass_at_k.k_schedule": Key((), "Pairs (step, k), the first at step 0, such as "
        "`((0, 4), (60, 1))`. Empty: constant `k`.",
        is_valid=_is_k_schedule, expected="pairs (step, k) of integers with the first at step "
        "0 and increasing steps, k at least 1, or ()"),
    # ----------------------------------------------------------------------------- loss
    "loss.name": Key("clip", "`clip`, `gspo`, `cispo`, `dppo`, or a dotted name.", names_code=True),
    "loss.settings": Key({}, "Keyword arguments of your loss.", example=1),
    "loss.clip_low": Key(0.2, "Lower bound of the ratio: 1 - `clip_low`. Published: 3e-4 for "
        "GSPO, 1 for CISPO (no bound). For `dppo`, the largest divergence of a token that "
        "becomes less likely.", at_least=0),
    "loss.clip_high": Key(0.2, "Upper bound of the ratio: 1 + `clip_high`. Published: 4e-4 for "
        "GSPO, 4 for CISPO. For `dppo`, the largest divergence of a token that becomes more "
        "likely.",
        at_least=0),
    "loss.clip.dual_clip": Key(0.0, "Bound of the loss at negative advantages, above 1. 0: none.",
        is_valid=lambda v: v == 0 or v > 1, expected="a number above 1, or 0 for no bound"),
    **_get_extra_keys("loss.dppo"),
    "loss.term.name": Key("none", "Additional loss term: `llds`, which preserves the likelihood "
        "of tokens without a negative advantage; or a dotted name.",
        names_code=True),
    "loss.term.coef": Key(0.2, "Coefficient of the term.", above=0),
    "loss.term.settings": Key({}, "Keyword arguments of your term.", example=1),
    **_get_extra_keys("loss.term.llds"),
    "loss.token_filter.name": Key("none", "Tokens with a policy loss: `off_policy` removes wrong "
        "trajectories that the policy has moved away from; or a dotted name.",
        names_code=True),
    "loss.token_filter.settings": Key({}, "Keyword arguments of your token filter.", example=1),
    **_get_extra_keys("loss.token_filter.off_policy"),
    "loss.aggregation": Key("token-mean", "`token-mean`, `seq-mean-token-mean`, "
        "`seq-mean-token-sum`, `seq-mean-token-sum-norm`, or a dotted name.",
        names_code=True),
    "loss.entropy_coef": Key(0.0, "Coefficient of the entropy bonus."),
    "loss.mask_observations": Key(True, "False also trains on the text of observations."),
    "loss.old_logprobs": Key("trainer", "Denominator of the ratio: `trainer` scores the batch "
        "before its updates; `sampler` reuses the logprobs of the rollout.",
        one_of=("trainer", "sampler")),
    "loss.correction.level": Key("none", "Importance weights, trainer over sampler: `none`, "
        "`token`, `sequence`, or `geometric` (a sequence's geometric mean).",
        one_of=("none", "token", "sequence", "geometric")),
    "loss.correction.mode": Key("truncate", "`truncate`: at most `cap`; `mask`: 0 outside `low` "
        "to `high`; `reject`: 0 outside, 1 inside.", one_of=("truncate", "mask", "reject")),
    "loss.correction.cap": Key(2.0, "Largest weight with `truncate`.", at_least=1),
    "loss.correction.low": Key(0.5, "Smallest ratio kept.", at_least=0),
    "loss.correction.high": Key(5.0, "Largest ratio kept.", above=0),
    # ------------------------------------------------------------------------------- KL
    "kl.coef": Key(0.0, "KL coefficient; its initial value if a controller adapts it. 0: no term.",
        at_least=0),
    "kl.estimator": Key("k3", "`k1`, `k2`, `k3`, `abs`, with `+` for the gradient of `k2`; or a "
        "dotted name.", names_code=True),
    "kl.anchor": Key("ref", "`ref`: the policy at the start of the stage; `old`: the policy "
        "before the update.", one_of=("ref", "old")),
    "kl.apply_to": Key("loss", "`loss`, or `reward`: subtracted from the trajectory's reward.",
        one_of=("loss", "reward")),
    "kl.controller": Key("fixed", "`fixed`; `adaptive`: toward a target; `log`: the same on a "
        "logarithmic scale; `budget`: by difficulty.", one_of=KL_CONTROLLERS),
    "kl.adaptive.target": Key(0.1, "Target in nats per token.", above=0),
    "kl.adaptive.horizon": Key(10_000, "Trajectories over which the coefficient adapts.", above=0),
    "kl.log.target": Key(0.1, "Target in nats per token; ARES's code uses 0.01.", above=0),
    "kl.log.min_coef": Key(1e-4, "Lower bound of the coefficient.", above=0, at_most=100),
    "kl.budget.budgets.easy": Key(0.05, "Budget of easy tasks, nats per token.", above=0),
    "kl.budget.budgets.medium": Key(0.1, "Budget of medium tasks, nats per token.", above=0),
    "kl.budget.budgets.hard": Key(0.2, "Budget of hard tasks, nats per token.", above=0),
    "kl.budget.step": Key(0.01, "Step of the multiplier per nat beyond the budget.", at_least=0),
    "kl.low_factor": Key(1.0, "Factor on the term before a high-entropy window. 1: off.",
        at_least=0, at_most=1),
    "kl.second_chance": Key(False, "Reduce the term on high-entropy wrong answers to easy "
        "tasks."),
    # ------------------------------------------------------------ optimizer, warm start
    **_define_optimizer_keys("optimizer"),
    "optimizer.num_minibatches": Key(1, "Optimizer steps per batch and epoch. Groups are not "
        "split.", above=0),
    "optimizer.num_epochs": Key(1, "Passes over each batch.", above=0),
    "optimizer.skip_signal_free": Key(True, "Skip the backward pass of trajectories without a "
        "gradient, which does not change the step.",
        restart=FREE),
    "sft.source": Key("", "JSONL of chats: `{'messages': [user, assistant, tool, assistant, …]}`."),
    "sft.num_steps": Key(100, "Optimizer steps of the `sft` stage.", above=0),
    "sft.batch_size": Key(32, "Demonstrations per step.", above=0),
    **_link_descriptions("optimizer", _define_optimizer_keys("sft.optimizer")),
    # ----------------------------------------------------------------------- evaluation
    "eval.every_steps": Key(0, "Steps between evaluations in training, in addition to "
        "those before the first and after the last step. 0: only those two.", at_least=0),
    "eval.suites": Key(("sampled", "greedy"), "Suites in training: `sampled`, `greedy`, "
        "`empty_search` (finds nothing), `random_search` (finds random documents), "
        "`blank_images`.", some_of=SUITES),
    "eval.final_suites": Key(("sampled", "greedy", "empty_search"), "Suites of the `evaluate` "
        "stage.", some_of=SUITES, restart=FREE),
    # With more than 256, counting votes over all subsets takes seconds per question.
    "eval.samples": Key(1, "Samples per question; `greedy` has one.", above=0, at_most=256),
    "eval.temperature": Key(1.0, "Temperature of these samples.", at_least=MIN_TEMPERATURE,
        expected=f"a number of at least {MIN_TEMPERATURE}; the suite 'greedy' is that of 0"),
    "eval.top_p": Key(1.0, "Nucleus sampling probability of these samples.", above=0, at_most=1),
    "eval.ks": Key((), "Values of k for pass@k and maj@k. Empty: powers of two below `samples`, "
        "and `samples`.", restart=FREE),
    "eval.resamples": Key(1000, "Bootstrap resamples for intervals.", above=0,
        restart=FREE),
    "eval.max_tasks": Key(0, "Tasks per held-out source, from its start. 0: all.",
        at_least=0),
    "eval.best_metric": Key("val-core/all/exact_match/mean@1", "Metric (higher is better) for "
        "`checkpoint.keep_best` and `patience`."),
    "eval.patience": Key(0, "Evaluations without improvement after which the `train` stage ends. "
        "0: off.", at_least=0),
    "eval.min_delta": Key(0.0, "Smallest improvement of `best_metric` that counts.", at_least=0),
    # --------------------------------------------------------------------------- watch
    "watch.name": Key("none", "Check of each step for signs of collapse: `none`, `sentinel`, or "
        "a dotted name.", names_code=True),
    "watch.settings": Key({}, "Keyword arguments of your check.", example=1),
    "watch.action": Key("warn", "`warn`; `lower_lr`; `roll_back` to the last good checkpoint, "
        "with other samples and a lower learning rate; `stop` with exit code 70.",
        one_of=("warn", "lower_lr", "roll_back", "stop")),
    "watch.actions": Key({}, "Actions for individual signs, such as "
        "`{'reward_fell': 'roll_back'}`.",
        example="warn",
        is_valid=lambda v: {*v.values()} <= {"warn", "lower_lr", "roll_back", "stop"},
        expected="an action for each sign: 'warn', 'lower_lr', 'roll_back' or 'stop'"),
    "watch.lr_factor": Key(0.5, "Factor by which `lower_lr` and `roll_back` multiply the "
        "learning rate.", above=0, at_most=1),
    "watch.max_roll_backs": Key(3, "Maximum rollbacks; the next one ends the run.", at_least=0),
    **_get_extra_keys("watch.sentinel"),
    "watch.stall_s": Key(600.0, "Seconds without progress after which the run prints the stack "
        "of every thread. 0: never.",
        at_least=0),
    "watch.deadline_s": Key(7200.0, "Seconds without progress after which a run exits with code "
        "76. Must exceed the longest compilation or indexing. 0: never.",
        at_least=0),
    # --------------------------------------------------------- costs, checkpoints, logs
    "ledger.prices": Key({}, "Price of one request to a tool or judge, in a unit of your choice, "
        "by name, such as `{'search': 0.001}`.",
        example=0.001,
        is_valid=lambda v: all(is_finite(price) and price >= 0 for price in v.values()),
        expected="a price of at least 0 for each tool"),
    "ledger.max_cost": Key(0.0, "Budget of the run in that unit. 0: no limit.", at_least=0),
    "ledger.max_calls": Key(0, "Limit on requests, including retries. 0: no limit.", at_least=0),
    "checkpoint.every_steps": Key(20, "Steps between checkpoints.", above=0),
    "checkpoint.keep": Key(2, "Newest checkpoints kept.", above=0),
    "checkpoint.keep_best": Key(0, "Checkpoints with the highest `eval.best_metric` also "
        "kept.", at_least=0),
    "log.every_steps": Key(0, "Steps between console lines if there is no terminal. 0: at most one "
        "per 5 s. Files contain every step.", at_least=0),
    "log.trajectories": Key(32, "Trajectories per step in `trajectories/`, and per table of "
        "trackers. -1: all.",
        at_least=-1, expected="0 or more, or -1 for all"),
    "log.tokens": Key(False, "Also write per-token advantages, weights, and log-probabilities "
        "before and after the update, which scores these trajectories twice."),
    "log.trackers": Key(("tensorboard",), "Trackers: `tensorboard`, `wandb`, `mlflow`, "
        "`trackio`, or dotted names.",
        is_valid=are_nonempty_strings, expected="a tuple of names, such as ('mlflow',)"),
    "log.project": Key("jaxrl", "Project or experiment in trackers.",
        is_valid=bool, expected="a name"),
}
# fmt: on

RESTART = {
    **dict.fromkeys(("mesh", "watch", "ledger", "checkpoint", "log"), FREE),
    "eval": EVALUATION,
    **dict.fromkeys(("shaping", "filter", "advantage", "loss", "kl"), TRAINING),
    **dict.fromkeys(("optimizer", "sft", "tasks.train"), TRAINING),
}
"""Default of `Key.restart` by section."""


def _get_default_restart_rule(name: str) -> str:
    sections = (value for section, value in RESTART.items() if name.startswith(f"{section}."))
    return next(sections, RESULTS)


KEYS = {
    name: replace(key, restart=key.restart or _get_default_restart_rule(name))
    for name, key in _ENTRIES.items()
}
"""All configuration keys by full dotted name."""


class Config(ConfigDict):
    """Configuration, or a section of it, with one-line errors that name the full key.

    By contrast, errors from ml_collections list all keys of a section.
    """

    _section = ""  # name of the section with a trailing dot

    def set_section(self, section: str) -> Config:
        """Set the section name for error messages; return self."""
        object.__setattr__(self, "_section", f"{section}.")
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        """Set a key. Raise a ValueError if it does not exist or the value has the wrong type."""
        name = f"{self._section}{key}"
        if self.is_locked and key not in self and (problem := explain_unknown_key(name)):
            raise ValueError(problem)
        type_error = None
        try:
            super().__setitem__(key, value)
        except TypeError as error:
            type_error = error
        # Raised outside the handler, so that the traceback omits the original error.
        if type_error is not None:
            if problem := explain_unknown_key(name):
                raise ValueError(problem)
            KEYS[name].check(name, value)
            raise type_error

    def __getattr__(self, attribute: str) -> Any:
        """Return a key's value or a section. Raise an AttributeError if it does not exist."""
        try:
            return super().__getattr__(attribute)
        except AttributeError as error:
            problem = explain_unknown_key(f"{self._section}{attribute}") or str(error)
        raise AttributeError(problem)

    def copy_and_resolve_references(self, visit_map: dict[int, Any] | None = None) -> Config:
        """Copy the configuration and its section name. See ml_collections."""
        copy = super().copy_and_resolve_references(visit_map)
        object.__setattr__(copy, "_section", self._section)
        return copy


KEY_ALIASES = {
    "learning_rate": "lr",
    "max_grad_norm": "grad_clip",
    "kl_coef": "kl.coef",
    "clip_ratio": "loss.clip_high",
    "batch_size": "tasks_per_step",
    "num_generations": "group_size",
    "max_tokens": "max_response_tokens",
    "max_new_tokens": "max_response_tokens",
    "max_prompt_length": "max_prompt_tokens",
    "max_model_len": "max_total_tokens",
    "max_steps": "num_steps",
}
"""Last part of the equivalent key, by the name that other trainers or samplers use."""


def explain_unknown_key(key: str) -> str:
    """Return an error message if a dotted key is unknown, or "" if it exists."""
    if key in KEYS:
        return ""
    if folder := find_missing_extra(key):
        return (
            f"config.{key} is a key of jaxrl/extras/{folder}, and that folder is missing; restore "
            "it or remove the key."
        )
    nested = [name for name in KEYS if name.startswith(f"{key}.")]
    if nested:
        return f"config.{key} is a section; set its keys, such as {nested[0]}."
    # Suggest keys with the same last part, or else the key or section with the most similar name.
    last = key.rpartition(".")[2]
    last = KEY_ALIASES.get(last, last)
    matches = [name for name in KEYS if f".{name}".endswith(f".{last}")]
    if matches:
        matches = difflib.get_close_matches(key, matches, n=3, cutoff=0)
    else:
        sections = {name.rpartition(".")[0] for name in KEYS}
        matches = difflib.get_close_matches(key, [*KEYS, *sections], n=1)
    question = f"did you mean {' or '.join(matches)}?"
    hint = question if matches else "docs/configuration.md has all keys."
    return f"there is no key config.{key}; {hint}"


def default_config() -> Config:
    """Return a configuration in which every key has its default value."""
    config = Config(convert_dict="" not in _SECTIONS_WITH_MAPPINGS)
    for key, entry in KEYS.items():
        *sections, name = key.split(".")
        parent = config
        for depth, section in enumerate(sections, start=1):
            if section not in parent:
                # In sections with mappings, ConfigDict must not convert these to sections.
                prefix = ".".join(sections[:depth])
                inner = Config(convert_dict=prefix not in _SECTIONS_WITH_MAPPINGS)
                parent[section] = inner.set_section(prefix)
            parent = parent[section]
        default = placeholder(bool) if entry.default is None else entry.default
        parent[name] = dict(default) if isinstance(default, dict) else default
    return config


MAPPING_EXAMPLES = {
    key: entry.example for key, entry in KEYS.items() if isinstance(entry.default, dict)
}
"""Example item by key, for keys whose values are mappings with user-defined names."""

_SECTIONS_WITH_MAPPINGS = {key.rpartition(".")[0] for key in MAPPING_EXAMPLES}


def flatten_config(values: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a configuration or nested mapping to a dict with dotted keys.

    Raises:
        ValueError: A key occurs twice, in nested and in dotted form.
    """
    flat: dict[str, Any] = {}
    for key, value in (values if isinstance(values, Mapping) else values.to_dict()).items():
        name = f"{prefix}{key}"
        is_section = isinstance(value, dict) and name not in MAPPING_EXAMPLES
        inner = (
            flatten_config(value, f"{name}.")
            if is_section
            else {name: convert_lists_to_tuples(value)}
        )
        if repeated := sorted(inner.keys() & flat.keys()):
            raise ValueError(f"{repeated[0]} is set twice, nested and with dots; leave one out.")
        flat |= inner
    return flat


def convert_lists_to_tuples(value: Any) -> Any:
    """Convert lists to tuples recursively, because the configuration stores tuples."""
    if not isinstance(value, list | tuple):
        return value
    return tuple(
        {key: convert_lists_to_tuples(nested) for key, nested in item.items()}
        if isinstance(item, dict)
        else convert_lists_to_tuples(item)
        for item in value
    )


def read_flat_config(path: Path) -> dict[str, Any]:
    """Read a workdir's `config.json` and return its values by dotted key."""
    return flatten_config(read_object(path))


def serialize_config(config: ConfigDict) -> str:
    """Serialize a configuration to JSON, as in a workdir's `config.json`."""
    return json.dumps(config.to_dict(), indent=2, ensure_ascii=False) + "\n"
