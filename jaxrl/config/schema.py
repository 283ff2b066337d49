"""Every configuration key, once: default, meaning, what it takes, and what a restart may change.

Checks of single values, `default_config()`, what a restart compares and the tables of
docs/configuration.md come from `KEYS`. Those of an optional capability stand in its folder, and
rules between keys in `jaxrl/builders/validation.py` and `extras/*/keys.py`.
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
    FREE,
    MODEL,
    REPLAY,
    RESULTS,
    TRAINING,
    Key,
    are_texts,
    is_finite,
    load_extra_keys,
)
from jaxrl.utils.json_io import read_object

SECTIONS = {
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
    "loss.gate.off_policy": "stability",
    "watch.sentinel": "sentinel",
}
"""Sections and single keys that optional capabilities bring, and their folders in `extras/`."""

EXTRA_KEYS = {folder: load_extra_keys(folder) for folder in dict.fromkeys(SECTIONS.values())}
"""Keys and rules of each of these folders."""


def _extra(section: str) -> dict[str, Key]:
    return EXTRA_KEYS[SECTIONS[section]].section(section)


def missing_folder(key: str) -> str:
    """Return the missing folder that a key or its section belongs to, or ""."""
    folders = [f for section, f in SECTIONS.items() if f"{key}.".startswith(f"{section}.")]
    return next((folder for folder in folders if not EXTRA_KEYS[folder].keys), "")


EXPERTS = ("auto", "xla", "mosaic_gpu", "triton", "megablox")
ATTENTION = ("auto", "xla", "mosaic_gpu", "triton", "mosaic")
KL_CONTROLLERS = ("fixed", "adaptive", "log", "budget")
OWN_MODEL = "model"
SUITES = ("sampled", "greedy", "empty_search", "random_search", "blank_images")

MIN_TEMPERATURE = 1e-3
"""Less draws the most likely token all but always, and far less makes logits infinite."""


def _are_messages(values: tuple[Any, ...]) -> bool:
    return all(isinstance(one, dict) and set(one) == {"role", "content"} for one in values)


def _are_mappings(values: dict[str, Any]) -> bool:
    return all(isinstance(one, dict) for one in values.values())


def _is_k_schedule(pairs: tuple[Any, ...]) -> bool:
    """Return True for pairs (step, k) of whole numbers, steps rising from 0."""
    if not all(isinstance(one, tuple) and [type(n) for n in one] == [int, int] for one in pairs):
        return False
    steps = [step for step, _ in pairs]
    is_rising = steps[:1] in ([], [0]) and steps == sorted(set(steps))
    return is_rising and all(k >= 1 for _, k in pairs)


# A table, laid out by hand: key, default, meaning; then what it takes, and what a restart may do.
# fmt: off
def _optimizer(section: str) -> dict[str, Key]:
    """Return the keys that supervised and reinforcement learning share."""
    return {
        f"{section}.lr": Key(1e-6, "Peak learning rate of AdamW.", at_least=0),
        f"{section}.warmup_steps": Key(0, "Steps in which the rate rises to its peak; the first "
            "has 1 / `warmup_steps` of it.", at_least=0),
        f"{section}.schedule": Key("constant", "Learning rate after the warm-up: `constant`, "
            "`linear`, `cosine`, or one of your own by its dotted name.", names_code=True),
        f"{section}.final_lr_fraction": Key(0.0, "Share of the peak at which `linear` and `cosine` "
            "end.", at_least=0, at_most=1),
        f"{section}.weight_decay": Key(0.01, "Decoupled weight decay of every parameter.",
            at_least=0),
        f"{section}.beta1": Key(0.9, "Decay of AdamW's first moment.", at_least=0, below=1),
        f"{section}.beta2": Key(0.999, "Decay of AdamW's second moment.", at_least=0, below=1),
        f"{section}.epsilon": Key(1e-8, "Added to the root of the second moment.", above=0),
        f"{section}.grad_clip": Key(1.0, "Global norm to which gradients are clipped. 0: none.",
            at_least=0),
        # The second moment has no such key: with beta2 = 0.999 a step changes it by less than
        # bfloat16 can tell apart.
        f"{section}.moments_dtype": Key("float32", "Dtype of AdamW's first moment; the second is "
            "float32.", one_of=DTYPES),
        f"{section}.offload": Key(False, "Keep both moments in the host's memory between updates.",
            restart=FREE),
        f"{section}.micro_rows": Key(8, "Packed rows of a micro-batch; a multiple of `data` × "
            "`fsdp` × `expert`. 0: as many as the memory holds, on a CPU two or 512 tokens.",
            at_least=0, restart=FREE),
    }


def _tasks(name: str, what: str, split: str) -> dict[str, Key]:
    """Return the keys of a set of tasks."""
    return {
        f"tasks.{name}.source": Key("", f"{what}: a file, a pattern with `*`, a folder, or the "
            "name of what a generator makes."),
        f"tasks.{name}.format": Key("", "`jsonl`, `csv`, `parquet` (verl's too), `tfds`, `hf` "
            "(`save_to_disk`; extra `datasets`), `reasoning_gym` (extra `reasoning-gym`), or a "
            "reader of your own by its dotted name. Empty: by the source."),
        f"tasks.{name}.split": Key(split, "Split of `tfds` and `hf`; of `tfds` also a part: "
            "`train[:90%]`."),
        f"tasks.{name}.settings": Key({}, "Keyword arguments of the reader, as `{'delimiter': "
            "';'}` of `csv`.", example=1, is_nested=True),
        f"tasks.{name}.columns": Key({}, "Columns under other names than ours: `{'problem': "
            "'question'}`. An empty name leaves a column out.", example="question"),
        f"tasks.{name}.data_source": Key("", "Data source of all tasks, and prefix of their ids. "
            "Empty: as the tasks have it."),
        f"tasks.{name}.sources": Key((), "Several sources in place of the one above: mappings of "
            "these keys and, of training, `weight` (default 1), as `({'source': 'a.csv', 'weight': "
            "2.0}, {'source': 'b.jsonl'})`."),
    }


STAGES = ("sft", "train", "evaluate")
"""Stages of a run, in their order."""

_ENTRIES: dict[str, Key] = {
    "stages": Key(("train", "evaluate"), "Stages of the run, in this order: `sft`, `train`, "
        "`evaluate`.", some_of=STAGES,
        is_valid=lambda v: v and v == tuple(sorted(set(v), key=STAGES.index)),
        expected=f"each at most once, in the order of {STAGES}", restart=FREE),
    "seed": Key(0, "Seed of task order and samples.", at_least=0, below=2**31),
    "num_steps": Key(100, "Steps of the stage `train`: rollouts and their updates.", above=0,
        restart=TRAINING),
    "compilation_cache": Key("", "Folder of compiled programs, which later starts find. Empty: "
        "`$XDG_CACHE_HOME/jaxrl/programs`; `off`: none.", restart=FREE),
    # ---------------------------------------------------------------------------- model
    "model.path": Key("", "Local folder in Hugging Face's format.", holds=MODEL,
        written_to="export"),
    "model.architecture": Key("", "Name of the architecture, or dotted name of its class. Empty: "
        "by `model_type` of `config.json`.", group="jaxrl.architectures", names_code=True),
    "model.dtype": Key("float32", "Dtype of activations, matrix products and KV cache; weights "
        "that are trained stay float32.", one_of=DTYPES),
    "model.head_dtype": Key("", "Dtype of the output layer's operands, hidden states and table, in "
        "sampler and trainer, where it is not `model.dtype`. Empty: as `model.dtype`; the products "
        "are float32 in any case.", one_of=("", "float32")),
    "model.eos_tokens": Key((), "Texts of further tokens that end a message, as `('<|im_end|>',)`, "
        "beside `eos_token` of `tokenizer_config.json` and `eos_token_id` of "
        "`generation_config.json`.", is_valid=are_texts,
        expected="a tuple of texts, as ('<|im_end|>',)"),
    "model.attention": Key("auto", "Attention kernels: `xla`, everywhere; `mosaic_gpu`, on Hopper "
        "GPUs; `triton`, on GPUs; `mosaic`, on TPUs; `auto`: the first of the platform's that pass "
        "their check.", one_of=ATTENTION, restart=FREE),
    "model.experts": Key("auto", "Products with experts: `xla`, everywhere; `mosaic_gpu`, on "
        "Hopper GPUs; `triton`, on GPUs; `megablox`, on TPUs; `auto`: as for attention.",
        one_of=EXPERTS, restart=FREE),
    "model.balance_coef": Key(0.0, "Coefficient of the loss by which the tokens of a mini-batch "
        "use experts alike, in both stages. 0: none.", at_least=0),
    "model.replay": Key(False, "Record what the architecture declares by token, and give training "
        "what the sampler had: send each token to the experts that were chosen for it then."),
    "model.remat": Key("full", "What the update computes again instead of keeping it. `full`: a "
        "whole layer; `names`: all but products with weights and attention's result; `dots`: all "
        "but products with weights, of any architecture; `none`: nothing. `offload`: all but a "
        "layer's input and attention's result, which wait in the host's memory.",
        one_of=("none", "dots", "names", "full", "offload"), restart=FREE),
    "model.scan_layers": Key(True, "Compile one layer for all. False compiles each, which takes "
        "longer; a CPU then keeps all of them, whatever `remat` says. The sampler compiles each on "
        "a CPU in any case, and on a GPU where there is no adapter.", restart=FREE),
    "model.freeze_tower": Key(False, "Do not train the tower, in a model that reads images: what "
        "reads patches, and what makes tokens of them."),
    "model.logits_chunk_tokens": Key(2048, "Tokens whose logits the update holds in memory at a "
        "time.", above=0, restart=FREE),
    **_extra("model.lora"),
    **_extra("images"),
    # --------------------------------------------------------------------------- policy
    "policy.name": Key(OWN_MODEL, "Who writes. `model`: that of `model.path`; `openai`: one behind "
        "an OpenAI-compatible endpoint, which is evaluated and not trained; of `model.path`, "
        "`config.json`, tokenizer and image processor are read then.",
        one_of=(OWN_MODEL, "openai")),
    **_extra("policy.openai"),
    # ----------------------------------------------------------------------------- mesh
    "mesh.data": Key(-1, "Devices over which rows are split, weights copied. -1: all that are "
        "left."),
    "mesh.fsdp": Key(1, "Devices over which rows and weights are split."),
    "mesh.context": Key(1, "Devices over which each packed row is split, for long ones, and "
        "weights; the sampler splits its trajectories over them."),
    "mesh.expert": Key(1, "Devices over which rows, experts and other weights are split."),
    "mesh.tensor": Key(1, "Devices over which heads and vocabulary are split."),
    "mesh.rollout_devices": Key(0, "Devices of each process that only sample, with "
        "`rollout.ahead`; the others train. A multiple of `expert` × `tensor`. 0: all do both.",
        at_least=0),
    # ---------------------------------------------------------------- tasks and prompts
    **_tasks("train", "Training tasks", "train"),
    **_tasks("eval", "Held-out tasks", "test"),
    "prompt.system": Key("", "System message. Empty: none, also where the model's template has one "
        "of its own."),
    "prompt.template": Key("{question}", "Message of the user, around the question.",
        is_valid=lambda v: "{question}" in v, expected="text that contains {question}"),
    "prompt.examples": Key((), "Messages (`{'role', 'content'}`) between the two, as worked "
        "examples.", is_valid=_are_messages, expected="messages with 'role' and 'content'"),
    "prompt.chat_template_kwargs": Key({}, "Variables of the model's chat template, as "
        "`{'enable_thinking': False}`.", example=False),
    # ---------------------------------------------------------------------- environment
    "env.name": Key("search", "`search`: questions answered with a search engine; `math`: problems "
        "solved in one turn; `agents`: tasks given to programs that ask the model over HTTP (extra "
        "`serve`); or one of your own by its dotted name, as `my_env.MyEnv`.",
        group="jaxrl.environments", names_code=True),
    "env.settings": Key({}, "Keyword arguments of an environment of your own.", example=1,
        is_nested=True),
    "env.step_deadline_s": Key(600.0, "Seconds after which a call of the environment is given up, "
        "its episodes environment errors. 0: never.", at_least=0, restart=FREE),
    **_extra("env.agents"),
    "env.search.protocol": Key("search_r1", "`search_r1` (`<information>`), `bapo` (`<result>`, "
        "`\\boxed{}`), `qwen` (the model's own tool calls, as its chat template has them), or a "
        "dotted name.", names_code=True),
    "env.search.tools": Key((), "Tools beside the search engine: `python`, a sandbox (extra "
        "`python-tool`), or dotted names of classes and of functions (extra `tools`).",
        group="jaxrl.tools"),
    **_extra("env.search.mcp"),
    "env.search.tool_deadline_s": Key(60.0, "Seconds for a call of a function or an MCP server.",
        above=0),
    **_extra("env.search.python"),
    "env.search.search_r1.format_reward": Key(0.5, "Pay of a response that keeps to the protocol."),
    "env.search.search_r1.format_failure": Key(-1.0, "Pay of one that does not."),
    "env.search.search_r1.answer_reward": Key(1.0, "Pay of an answer close to the truth."),
    "env.search.search_r1.exact_match_bonus": Key(2.0, "Pay of the truth itself, in place of "
        "that."),
    "env.search.search_r1.not_found": Key(0.5, 'Pay of the answer 未找到相关内容, '
        '"no relevant content found".'),
    "env.search.qwen.format_reward": Key(0.0, "Pay of a response that keeps to the protocol."),
    "env.search.qwen.format_failure": Key(-1.0, "Pay of one that does not."),
    # --------------------------------------------------------------------------- search
    "search.engine": Key("local", "`local`: embedded index over a corpus; `http`: a retriever on a "
        "port; `web`: a provider of web searches; `dense`: vectors of an encoder; `hybrid`: "
        "`local` and `dense`, fused; `empty`: finds nothing; `none`: there is no such tool, with "
        "`env.search.protocol='qwen'`; or a dotted name.", group="jaxrl.engines", names_code=True),
    "search.settings": Key({}, "Keyword arguments of an engine of your own.", example=1,
        is_nested=True),
    # What stands around any engine, in this order; docs/environments.md has the whole.
    "search.cache_mib": Key(64.0, "MiB of results kept in memory; the least recently used go. 0: "
        "none.", at_least=0, restart=FREE),
    "search.cache_ttl_s": Key(0.0, "Seconds for which a kept result counts. 0: for ever.",
        at_least=0, restart=FREE),
    "search.queries_per_second": Key(0.0, "Queries sent a second at most, those of a batch one by "
        "one. 0: no limit.", at_least=0, restart=FREE),
    "search.max_concurrent": Key(0, "Calls of the engine under way at most; a batch is one. 0: as "
        "many as the engine says.", at_least=0, restart=FREE),
    "search.deadline_s": Key(120.0, "Seconds after which one call of the engine has failed.",
        above=0, restart=FREE),
    "search.retries": Key(3, "Further tries of a query that fails while the engine answers others; "
        "then its episode ends as an environment error. While nobody gets an answer, tries do not "
        "count.", at_least=0, restart=FREE),
    "search.backoff_s": Key(1.0, "Seconds before the first of them, doubled from try to try up to "
        "30, and a quarter more or less. A server's `Retry-After` counts for all queries.",
        at_least=0, restart=FREE),
    "search.breaker_failures": Key(8, "Failed calls in a row after which nobody asks. 0: never.",
        at_least=0, restart=FREE),
    "search.breaker_rest_s": Key(5.0, "Seconds until one call tries again.", above=0, restart=FREE),
    "search.outage_deadline_s": Key(300.0, "Seconds without any answer, after which the engine "
        "counts as down.", above=0, restart=FREE),
    "search.on_outage": Key("stop", "What follows. `stop`: the run saves and ends with exit code "
        "69; `empty`: episodes go on with what an old cache holds or an empty result, and end as "
        "environment errors.", one_of=("stop", "empty"), restart=FREE),
    "search.replay": Key("off", "`record`: results are kept on disk, and what is there is not "
        "asked again; `only`: these alone answer, without an engine; `off`: neither.",
        one_of=REPLAY, restart=FREE),
    "search.replay_folder": Key("", "Folder of the recording. Empty: `searches/` in the workdir.",
        restart=FREE),
    "search.local.corpus": Key("", "JSONL of documents: `id`, `title`, `text`.", required="a path",
        holds=CORPUS),
    "search.local.index": Key("", "Folder of the index. Empty: beside the corpus."),
    "search.local.topk": Key(3, "Documents that a query returns.", above=0),
    "search.http.url": Key("", "Address of the server, as `http://127.0.0.1:8000/retrieve`.",
        required="the address of a server, as http://127.0.0.1:8000", restart=FREE),
    "search.http.protocol": Key("search_r1", "`search_r1` or `flashrag`."),
    "search.http.topk": Key(3, "Documents that a query returns.", above=0),
    "search.http.key_env": Key("", "Environment variable that holds a bearer's key. Empty: none is "
        "sent.", restart=FREE),
    "search.http.timeout_s": Key(30.0, "Seconds of a request, to the last byte of its answer.",
        above=0, restart=FREE),
    "search.http.connections": Key(16, "Requests in flight at most.", above=0, restart=FREE),
    "search.http.batch_size": Key(64, "Queries in a request at most.", above=0, restart=FREE),
    "search.http.max_response_mib": Key(64.0, "MiB of an answer at most; a larger one is a "
        "failure.", above=0, restart=FREE),
    **_extra("search.web"),
    **_extra("search.dense"),
    **_extra("search.hybrid"),
    # --------------------------------------------------------------------------- reward
    "reward.weights": Key({"exact_match": 1.0}, "Weights of the environment's reward parts and of "
        "further ones: `math_verify`, which compares final answers as mathematics (extra `math`); "
        "judges, by their names; functions of your own, by dotted name, in our, verl's or TRL's "
        "signature. The reward is the weighted sum.", example=1.0, group="jaxrl.rewards",
        is_valid=lambda v: all(map(is_finite, v.values())),
        expected="a finite number for each part"),
    "reward.settings": Key({}, "Keyword arguments of functions of your own, as "
        "`{'my_reward.brevity': {'words': 50}}`.", example={}, is_nested=True,
        is_valid=_are_mappings, expected="names with mappings, as {'name': {'setting': 50}}"),
    "reward.deadline_s": Key(600.0, "Seconds for the functions of a batch, after which the "
        "episodes that still wait are environment errors. 0: never, and functions that are not "
        "async run in the run's own thread, one by one.", at_least=0, restart=FREE),
    "reward.correct": Key("exact_match", "Part that makes an answer correct: `exact_match`, `f1`, "
        "`bapo`, `math` or one that is not the environment's, where it is above 0; `answer`, where "
        "the answer is the truth or close to it, whatever that pays."),
    "reward.judges": Key({}, "Language models that grade responses, by name, as `{'helpful': "
        "{'url': 'http://judge:8000/v1', 'model': 'judge', 'prompt': '..{response}..'}}`; "
        "`jaxrl/extras/endpoints/judges.py` has all settings.", example={}, is_nested=True,
        is_valid=_are_mappings, expected="names with mappings, as {'name': {'setting': 50}}"),
    **_extra("reward.math_verify"),
    # -------------------------------------------------------------------------- shaping
    "shaping.overlong_buffer": Key(0, "Tokens before the limit over which the penalty grows. 0: "
        "off.", at_least=0),
    "shaping.overlong_max_tokens": Key(0, "The limit, tool text counted. 0: in math "
        "`rollout.max_response_tokens`, and where there are tools what `rollout.max_total_tokens` "
        "leaves beside the longest prompt.", at_least=0),
    "shaping.overlong_factor": Key(1.0, "Reward lost at the limit and beyond.", at_least=0),
    "shaping.boundary_aware": Key(False, 'Pay for "I don\'t know" in groups without a correct '
        'answer.'),
    "shaping.abstention_bonus": Key(0.5, "Pay of an abstention.", at_least=0),
    "shaping.abstention_rate": Key(0.1, "Share of abstentions in a batch from which it pays "
        "nothing in the early stage.", at_least=0, at_most=1),
    "shaping.stage_level": Key(True, "Have an early stage first; the late one begins once "
        "evaluations stop improving."),
    "shaping.stage_tolerance": Key(5, "Evaluations below the best one that the early stage "
        "outlives, over the whole run.", at_least=0),
    "shaping.sample_level": Key(True, "In the late stage, pay nothing to groups whose answers "
        "still differ much."),
    "shaping.entropy_reward": Key(False, "Pay by difficulty for tokens before which the policy "
        "wavers."),
    "shaping.centred_gain": Key(False, "Its gains start at 0 rather than at half of their size."),
    "shaping.entropy_window": Key(4, "Tokens whose mean entropy makes a window.", above=0),
    "shaping.entropy_percentile": Key(95.0, "Percentile of each trajectory's windows; their median "
        "is the threshold.", at_least=0, at_most=100),
    "shaping.entropy_decay": Key(0.99, "Decay of the threshold's moving average.", at_least=0,
        at_most=1),
    "shaping.trigger_words": Key((), "Words; only tokens that are one of them count. Empty: all.",
        is_valid=lambda v: all(isinstance(word, str) and word.strip() for word in v),
        expected="a tuple of words"),
    "shaping.alpha_init": Key(0.5, "First coefficient of the entropy reward, by difficulty.",
        at_least=0),
    "shaping.alpha_step": Key(0.05, "Change of the coefficient per token of distance from the "
        "target.", at_least=0),
    "shaping.alpha_max": Key(2.0, "The coefficient stays between 0 and this.", at_least=0),
    "shaping.bootstrap_tasks": Key(0, "Tasks rolled out before the first step, to set all this up. "
        "-1: all.", at_least=-1, expected="-1 (all) or more"),
    # -------------------------------------------------------------------------- rollout
    "rollout.tasks_per_step": Key(16, "Groups trained on in a step; without a filter the tasks "
        "drawn.", above=0, restart=TRAINING),
    "rollout.group_size": Key(8, "Trajectories of each task.", above=0, restart=TRAINING),
    "rollout.temperature": Key(1.0, "Temperature of sampling, and of the log-probabilities that "
        "are trained on; evaluation has its own.", at_least=MIN_TEMPERATURE,
        expected=f"a number of at least {MIN_TEMPERATURE}; the suite 'greedy' is that of 0",
        restart=TRAINING),
    "rollout.top_p": Key(1.0, "Draw from the likeliest tokens of this probability. 1: from all.",
        above=0, at_most=1, restart=TRAINING),
    "rollout.max_prompt_tokens": Key(1024, "Tokens of a task's prompt.", above=0),
    "rollout.overlong_prompts": Key("refuse", "What becomes of a longer prompt. `refuse`: the run "
        "does not begin; `drop`: its task is left out; `truncate_left`: its first tokens are cut "
        "off.", one_of=("refuse", "drop", "truncate_left")),
    "rollout.max_response_tokens": Key(512, "Sampled tokens of a trajectory, over all turns.",
        above=0),
    "rollout.max_total_tokens": Key(2048, "Prompt, sampled tokens and observations of a "
        "trajectory.", above=0),
    "rollout.context.name": Key("none", "What becomes of an episode whose context has no room for "
        "another turn. `none`: it ends. It goes on in another context that begins with the prompt "
        "and, `drop_observations`: all turns, with the bodies of older observations left out; "
        "`last_turns`: the newest turns.", one_of=("none", "drop_observations", "last_turns"),
        restart=TRAINING),
    "rollout.context.max_tokens": Key(0, "Tokens of a context, which is what the sampler has room "
        "for; `max_total_tokens` counts all contexts of a trajectory, what comes again in each "
        "included.", at_least=0, restart=TRAINING),
    "rollout.context.keep": Key(1, "Newest observations, or turns, that the next context begins "
        "with; fewer where there is no room for them.", above=0, restart=TRAINING),
    "rollout.context.turn_tokens": Key(64, "Tokens that a turn must have room for, or the next "
        "context begins.", above=0, restart=TRAINING),
    "rollout.max_image_tokens": Key(0, "Image tokens of a trajectory, in prompt and observations, "
        "for which sampler and update have room where images are read. 0: as many as "
        "`max_total_tokens`, or where nothing answers a turn as `max_prompt_tokens`.", at_least=0),
    "rollout.max_observation_tokens": Key(500, "Tokens of one result, the rest of which is cut off "
        "inside its tags.", above=0),
    "rollout.max_turns": Key(4, "Turns that call tools; asking once more ends the episode. Turns "
        "that call none are not counted.", at_least=0),
    "rollout.max_calls": Key(0, "Calls in all these turns; the model is told of one beyond. 0: no "
        "limit.", at_least=0),
    "rollout.max_cost": Key(0.0, "Cost of a trajectory's calls at `ledger.prices`, each counted "
        "once; a call that would cost more ends it, out of budget. 0: no limit.", at_least=0),
    "rollout.num_rows": Key(64, "Trajectories decoded side by side, in all; a multiple of `data` × "
        "`fsdp` × `expert` × `context`.", above=0, restart=FREE),
    # The bound is more than any device has, in numbers that stay whole.
    "rollout.cache_gib": Key(0.0, "GiB of each device for their keys and values. 0: what the plan "
        "leaves, or on a CPU what `num_rows` trajectories of full length fill.", at_least=0,
        at_most=2**20, restart=FREE),
    "rollout.chunk_tokens": Key(16, "Decoding steps that the device takes before the host reads "
        "what was sampled.", above=0, restart=FREE),
    "rollout.deterministic": Key(None, "True: the environment's replies enter after a fixed number "
        "of chunks, and a run repeats bit for bit. False: replies enter at the first chunk after "
        "they arrive, which hides slow tools and changes samples only by rounding. None: True on "
        "CPUs, False on accelerators.", restart=FREE),
    "rollout.observation_lag_chunks": Key(2, "Chunks from the one in which a row stops to the one "
        "before which the reply enters, in a deterministic run. With 1 the device waits for the "
        "host and the environment between chunks. With more it decodes other rows meanwhile.",
        above=0, restart=FREE),
    "rollout.ahead": Key(0, "1: the groups of a step are sampled while the step before updates, by "
        "the weights before that update. 0: after it.", one_of=(0, 1), expected="0 or 1",
        restart=TRAINING),
    "rollout.max_failed_steps": Key(3, "Batches in a row of which every episode failed, after "
        "which the run stops with exit code 69; without a filter a step is a batch. So does a "
        "final evaluation of which all failed. 0: never.", at_least=0, restart=FREE),
    # --------------------------------------------------------------------------- filter
    "filter.name": Key("none", "`none`; `varied`: groups whose metric differs (dynamic sampling); "
        "`accuracy_range`: groups whose mean accuracy lies in a range (online filtering); or one "
        "of your own by its dotted name.", names_code=True),
    "filter.settings": Key({}, "Keyword arguments of a filter of your own.", example=1),
    "filter.varied.metric": Key("acc", "`acc`: correct or not; `score`: reward before shaping; "
        "`seq_reward`: after it; `seq_final_reward`: less the KL term in the reward.",
        one_of=("acc", "score", "seq_reward", "seq_final_reward")),
    "filter.accuracy_range.low": Key(0.01, "Lower end, itself out.", at_least=0, at_most=1),
    "filter.accuracy_range.high": Key(0.99, "Upper end, itself out.", at_least=0, at_most=1),
    "filter.trajectories": Key("none", "Which trajectories of these groups have a loss: "
        "`void_turns` leaves out those with a turn that neither calls nor answers; or a function "
        "of one's own by its dotted name. They count in the statistics of their group.",
        names_code=True),
    "filter.tasks_per_batch": Key(0, "Tasks drawn at a time until enough groups are kept. 0: "
        "`rollout.tasks_per_step`.", at_least=0),
    "filter.max_batches": Key(10, "Batches of one step, after which the run gives up. 0: never.",
        at_least=0, restart=FREE),
    "filter.carry_over": Key(False, "Keep leftover groups for the next step instead of dropping "
        "them."),
    "filter.unfinished_tasks": Key(0, "Tasks whose episodes may go on into the next step, so that "
        "none waits for the slowest; they are trained on as whole groups, once all have ended.",
        at_least=0),
    "filter.resample_attempts": Key(0, "New tries at groups all wrong without an abstention. 0: "
        "none.", at_least=0),
    "filter.resample_early": Key(False, "Try in the early stage of `shaping.stage_level` too."),
    "filter.skip_solved": Key(False, "Draw tasks no more once all their samples are right and "
        "sure."),
    "filter.skip_entropy": Key(0.1, "Nats; below this mean entropy they are sure.", at_least=0),
    # ----------------------------------------------------------------------- advantages
    "advantage.name": Key("grpo", "`grpo`, `rloo`, `reinforce_plus_plus`, `pass_at_k`, and of the "
        "last `pass_at_k_combination`, `pass_at_k_exceeding`, `pass_at_k_full_sampling`, "
        "`pass_at_k_bootstrap`, `pass_at_k_entropy_guided`; or one of your own by its dotted name, "
        "as `my_estimator.estimate`.", names_code=True),
    "advantage.settings": Key({}, "Keyword arguments of an estimator of your own.", example=1),
    "advantage.by_turn": Key(False, "True: a turn's tokens carry what is earned from that turn on, "
        "compared with what the others of the group earn from that turn on. False: all tokens "
        "carry the whole reward."),
    "advantage.turn_discount": Key(1.0, "By turns: factor on a reward for each turn that lies "
        "before it.", at_least=0, at_most=1),
    "advantage.grpo.normalize_std": Key(True, "Divide by the group's standard deviation."),
    "advantage.grpo.ddof": Key(1, "0: standard deviation of the population; 1: of the sample.",
        one_of=(0, 1), expected="0 (population) or 1 (sample)"),
    "advantage.grpo.epsilon": Key(1e-6, "Added to the standard deviation.", at_least=0),
    "advantage.reinforce_plus_plus.baseline": Key(False, "Subtract the group's mean first."),
    "advantage.pass_at_k.k": Key(4, "Answers of which one has to be right, also of the variants.",
        above=0),
    "advantage.pass_at_k.k_schedule": Key((), "Pairs (step, k), the first at step 0: `k` once so "
        "many steps of the stage `train` are done, as `((0, 4), (60, 1))`. Empty: `k` throughout.",
        is_valid=_is_k_schedule, expected="pairs (step, k) of whole numbers with the first at step "
        "0 and steps rising, k at least 1, or ()"),
    # ----------------------------------------------------------------------------- loss
    "loss.name": Key("clip", "`clip`, `gspo`, `cispo` or `dppo`; or one of your own by its dotted "
        "name.", names_code=True),
    "loss.settings": Key({}, "Keyword arguments of a loss of your own.", example=1),
    "loss.clip_low": Key(0.2, "The ratio's floor is 1 - `clip_low`. GSPO was published with 3e-4, "
        "CISPO with 1 (no floor). Of `dppo`, the largest divergence of a token that is made less "
        "likely.", at_least=0),
    "loss.clip_high": Key(0.2, "The ratio's ceiling is 1 + `clip_high`. GSPO was published with "
        "4e-4, CISPO with 4. Of `dppo`, the largest divergence of a token that is made likelier.",
        at_least=0),
    "loss.clip.dual_clip": Key(0.0, "Bound of the loss at negative advantages, above 1. 0: none.",
        is_valid=lambda v: v == 0 or v > 1, expected="a number above 1, or 0 for no bound"),
    **_extra("loss.dppo"),
    "loss.term.name": Key("none", "A loss that is added: `llds`, which keeps up the likelihood of "
        "tokens without a negative advantage; or one of your own by its dotted name.",
        names_code=True),
    "loss.term.coef": Key(0.2, "Its coefficient.", above=0),
    "loss.term.settings": Key({}, "Keyword arguments of one of your own.", example=1),
    **_extra("loss.term.llds"),
    "loss.gate.name": Key("none", "Which tokens have a policy loss: `off_policy` leaves out wrong "
        "trajectories that the policy has moved away from; or one of your own by its dotted name.",
        names_code=True),
    "loss.gate.settings": Key({}, "Keyword arguments of one of your own.", example=1),
    **_extra("loss.gate.off_policy"),
    "loss.aggregation": Key("token-mean", "`token-mean`, `seq-mean-token-mean`, "
        "`seq-mean-token-sum` or `seq-mean-token-sum-norm`; or one of your own by its dotted name.",
        names_code=True),
    "loss.entropy_coef": Key(0.0, "Coefficient of a bonus on the entropy of the sampled tokens' "
        "distributions."),
    "loss.mask_observations": Key(True, "False also trains on what the search engine wrote."),
    "loss.correction.level": Key("none", "Importance weights, trainer over sampler: `none`, "
        "`token`, `sequence`, or `geometric`: the sequence's mean a token.",
        one_of=("none", "token", "sequence", "geometric")),
    "loss.correction.mode": Key("truncate", "`truncate`: at most `cap`; `mask`: 0 outside `low` to "
        "`high`; `reject`: likewise, and 1 within.", one_of=("truncate", "mask", "reject")),
    "loss.correction.cap": Key(2.0, "Largest weight of `truncate`.", at_least=1),
    "loss.correction.low": Key(0.5, "Smallest ratio that is kept.", at_least=0),
    "loss.correction.high": Key(5.0, "Largest ratio that is kept.", above=0),
    # ------------------------------------------------------------------------------- KL
    "kl.coef": Key(0.0, "Weight of the KL term, where controlled its first value. 0: no term.",
        at_least=0),
    "kl.estimator": Key("k3", "`k1`, `k2`, `k3`, `abs`, with `+` for the gradient of `k2`; or one "
        "of your own by its dotted name.", names_code=True),
    "kl.anchor": Key("ref", "`ref`: the policy at the start of the stage; `old`: before the "
        "update.", one_of=("ref", "old")),
    "kl.place": Key("loss", "`loss`, or `reward`: taken off the trajectory's reward.",
        one_of=("loss", "reward")),
    "kl.controller": Key("fixed", "`fixed`; `adaptive`: towards a target; `log`: the same by the "
        "logarithm; `budget`: by difficulty.", one_of=KL_CONTROLLERS),
    "kl.adaptive.target": Key(0.1, "Nats a token.", above=0),
    "kl.adaptive.horizon": Key(10_000, "Trajectories in which the coefficient moves.", above=0),
    "kl.log.target": Key(0.1, "Nats a token; ARES's code has 0.01.", above=0),
    "kl.budget.budgets.easy": Key(0.05, "Nats a token of easy tasks.", above=0),
    "kl.budget.budgets.medium": Key(0.1, "Nats a token of medium ones.", above=0),
    "kl.budget.budgets.hard": Key(0.2, "Nats a token of hard ones.", above=0),
    "kl.budget.step": Key(0.01, "Step of the multiplier, per nat beyond the budget.", at_least=0),
    "kl.low_factor": Key(1.0, "Factor on the term where a window of high entropy follows. 1: off.",
        at_least=0, at_most=1),
    "kl.second_chance": Key(False, "Less of the term on wrong answers to easy tasks that wavered "
        "much."),
    # ------------------------------------------------------------ optimizer, warm start
    **_optimizer("optimizer"),
    "optimizer.num_minibatches": Key(1, "Optimizer steps per batch and epoch; whole groups each.",
        above=0),
    "optimizer.num_epochs": Key(1, "Times each batch is gone through.", above=0),
    "optimizer.skip_signal_free": Key(True, "Trajectories without a gradient go forward through "
        "the update, for its metrics, and not back: the step is the same and quicker.",
        restart=FREE),
    "sft.source": Key("", "JSONL of chats: `{'messages': [user, assistant, tool, assistant, …]}`."),
    "sft.num_steps": Key(100, "Optimizer steps of the stage `sft`.", above=0),
    "sft.batch_size": Key(32, "Demonstrations a step.", above=0),
    **_optimizer("sft.optimizer"),
    # ----------------------------------------------------------------------- evaluation
    "eval.every_steps": Key(0, "Steps between evaluations while training; always before the first "
        "and after the last step.", at_least=0),
    "eval.suites": Key(("sampled", "greedy"), "Suites while training: `sampled`, `greedy`, "
        "`empty_search` (sampled; the engine finds nothing), `random_search` (sampled; it finds "
        "documents of the corpus drawn at random), `blank_images` (sampled; images are there, and "
        "show nothing).", some_of=SUITES),
    "eval.final_suites": Key(("sampled", "greedy", "empty_search"), "Suites of the stage "
        "`evaluate`, out of the same.", some_of=SUITES, restart=FREE),
    # More take seconds a question: votes are counted over all subsets.
    "eval.samples": Key(1, "Samples of each question; `greedy` has one.", above=0, at_most=256),
    "eval.temperature": Key(1.0, "Temperature of these samples.", at_least=MIN_TEMPERATURE,
        expected=f"a number of at least {MIN_TEMPERATURE}; the suite 'greedy' is that of 0"),
    "eval.top_p": Key(1.0, "As `rollout.top_p`, of these samples.", above=0, at_most=1),
    "eval.ks": Key((), "Numbers of samples for pass@k and maj@k. Empty: powers of two below "
        "`samples`, and `samples`.", restart=FREE),
    "eval.resamples": Key(1000, "Bootstrap resamples of the questions, for the intervals.", above=0,
        restart=FREE),
    "eval.max_tasks": Key(0, "The first so many tasks of each held-out source. 0: all.",
        at_least=0),
    "eval.best_metric": Key("val-core/all/exact_match/mean@1", "Name in `metrics.jsonl`, higher is "
        "better, that `checkpoint.keep_best` and `patience` go by."),
    "eval.patience": Key(0, "Evaluations in a row without improvement that end the stage `train`. "
        "0: off.", at_least=0),
    "eval.min_delta": Key(0.0, "Improvement of `best_metric` that counts for `patience`; above "
        "this.", at_least=0),
    # --------------------------------------------------------------------------- watch
    "watch.name": Key("none", "What looks at each step of the stage `train` for signs of collapse: "
        "`none`; `sentinel`; or a function of your own by its dotted name.", names_code=True),
    "watch.settings": Key({}, "Keyword arguments of one of your own.", example=1),
    "watch.action": Key("warn", "What follows from a sign: `warn`; `lower_lr`; `roll_back` to the "
        "last checkpoint that was sound, with other draws and a lower learning rate; `stop`, with "
        "exit code 70.", one_of=("warn", "lower_lr", "roll_back", "stop")),
    "watch.actions": Key({}, "Actions of single signs, as `{'reward_fell': 'roll_back'}`.",
        example="warn",
        is_valid=lambda v: {*v.values()} <= {"warn", "lower_lr", "roll_back", "stop"},
        expected="an action for each sign: 'warn', 'lower_lr', 'roll_back' or 'stop'"),
    "watch.lr_factor": Key(0.5, "By which `lower_lr` and `roll_back` multiply the learning rate, "
        "each time.", above=0, at_most=1),
    "watch.max_roll_backs": Key(3, "Returns to a checkpoint after which the next sign that asks "
        "for one ends the run.", at_least=0),
    **_extra("watch.sentinel"),
    "watch.stall_s": Key(600.0, "Seconds without any progress after which the run prints what it "
        "waits for and where its threads are; then again after twice as long. 0: never.",
        at_least=0),
    "watch.deadline_s": Key(7200.0, "Seconds without any progress after which a run of `jaxrl "
        "train` ends with exit code 76; the same command goes on from its newest checkpoint. Its "
        "default is longer than a program takes to compile or a corpus to be indexed. 0: never.",
        at_least=0),
    # --------------------------------------------------------- costs, checkpoints, logs
    "ledger.prices": Key({}, "Price of asking a tool or a judge once, in a unit of yours, by its "
        "name, as `{'search': 0.001}`; the others are free. Answers of a cache or a recording cost "
        "nothing.", example=0.001,
        is_valid=lambda v: all(is_finite(price) and price >= 0 for price in v.values()),
        expected="a price of at least 0 for each tool"),
    "ledger.max_cost": Key(0.0, "What the run may spend, in that unit. Once a batch or an "
        "evaluation has reached it, the run saves and ends with exit code 78. 0: no limit.",
        at_least=0),
    "ledger.max_calls": Key(0, "How often it may ask them, retries counted and cached answers not; "
        "likewise.", at_least=0),
    "checkpoint.every_steps": Key(20, "Steps between checkpoints; stages end with one.", above=0),
    "checkpoint.keep": Key(2, "Newest checkpoints kept.", above=0),
    "checkpoint.keep_best": Key(0, "Checkpoints kept beside them, those with the highest "
        "`eval.best_metric`; above 0, the best evaluation so far makes a checkpoint due.",
        at_least=0),
    "log.trajectories": Key(32, "First trajectories of a step written to `trajectories/`. -1: all.",
        at_least=-1, expected="0 or more, or -1 for all"),
    "log.tokens": Key(False, "Also write what the update knows of each of their tokens: advantage, "
        "weights, and log-probabilities before and after it, for which a step scores them twice."),
    "log.wandb_project": Key("", "Project on Weights & Biases that metrics also go to. Empty: "
        "none."),
}
# fmt: on

RESTART = {
    **dict.fromkeys(("mesh", "watch", "ledger", "checkpoint", "log"), FREE),
    "eval": EVALUATION,
    **dict.fromkeys(("shaping", "filter", "advantage", "loss", "kl"), TRAINING),
    **dict.fromkeys(("optimizer", "sft", "tasks.train"), TRAINING),
}
"""What a restart may change in a section, apart from keys that have `restart`."""


def _restart(name: str) -> str:
    sections = (value for section, value in RESTART.items() if name.startswith(f"{section}."))
    return next(sections, RESULTS)


KEYS = {name: replace(key, restart=key.restart or _restart(name)) for name, key in _ENTRIES.items()}
"""All keys, with their sections."""


class Config(ConfigDict):
    """The configuration, or a section of it.

    Its errors name the whole key in one line. Those of ml_collections list all keys of a section.
    """

    _section = ""  # name of the section with a dot behind it

    def with_section(self, section: str) -> Config:
        """Set the name of the section, which errors show."""
        object.__setattr__(self, "_section", f"{section}.")
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        """Set a key; raise a ValueError if it does not exist or takes another type."""
        name = f"{self._section}{key}"
        if self.is_locked and key not in self and (problem := unknown_key(name)):
            raise ValueError(problem)
        wrong_type = None
        try:
            super().__setitem__(key, value)
        except TypeError as error:
            wrong_type = error
        # Raised out here, so that a traceback does not show the other error.
        if wrong_type is not None:
            if problem := unknown_key(name):
                raise ValueError(problem)
            KEYS[name].check(name, value)
            raise wrong_type

    def __getattr__(self, attribute: str) -> Any:
        """Return a key or a section; raise an AttributeError if it does not exist."""
        try:
            return super().__getattr__(attribute)
        except AttributeError as error:
            problem = unknown_key(f"{self._section}{attribute}") or str(error)
        raise AttributeError(problem)

    def copy_and_resolve_references(self, visit_map: dict[int, Any] | None = None) -> Config:
        """Return a copy; see ml_collections."""
        copy = super().copy_and_resolve_references(visit_map)
        object.__setattr__(copy, "_section", self._section)
        return copy


OTHER_NAMES = {
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
"""Names of other trainers and samplers, and the ends of the keys that mean the same."""


def unknown_key(key: str, *, in_file: bool = False) -> str:
    """Return what is wrong with the name of a key; "" if there is such a key.

    Args:
        key: Key with its sections and dots.
        in_file: True if a file of values sets it, False if Python or the command line does.
    """
    if key in KEYS:
        return ""
    if folder := missing_folder(key):
        return (
            f"config.{key} is a key of jaxrl/extras/{folder}, and that folder is not there; bring "
            "it back, or leave the key out."
        )
    inside = [name for name in KEYS if name.startswith(f"{key}.")]
    if inside:
        return f"config.{key} is a section; set its keys, as {inside[0]}."
    whole = next((mapping for mapping in MAPPINGS if key.startswith(f"{mapping}.")), None)
    if whole is not None:
        name, value = key.removeprefix(f"{whole}."), MAPPINGS[whole]
        mapping = f"{{{name!r}: {value}}}"
        example = mapping if in_file else f'--config.{whole}="{mapping}"'
        return f"config.{whole} takes a mapping; set it whole, as {example}."
    near = _similar_keys(key)
    hint = f"did you mean {' or '.join(near)}?" if near else "docs/configuration.md has all keys."
    return f"there is no key config.{key}; {hint}"


def _similar_keys(key: str) -> list[str]:
    """Return keys that may be meant, by the last part of the name, or else by its spelling."""
    section, _, last = key.rpartition(".")
    last = OTHER_NAMES.get(last, last)
    if f"{section}.{last}" in KEYS:
        return [f"{section}.{last}"]
    near = [name for name in KEYS if f".{name}".endswith(f".{last}")]
    if near:
        return difflib.get_close_matches(key, near, n=3, cutoff=0)
    prefix = f"{section}." if section else ""
    inside = [name.removeprefix(prefix).split(".")[0] for name in KEYS if name.startswith(prefix)]
    near = [f"{prefix}{name}" for name in difflib.get_close_matches(last, inside, n=1)]
    is_known_section = bool(section and inside)
    return near if near or is_known_section else difflib.get_close_matches(key, KEYS, n=1)


def default_config() -> Config:
    """Return all keys with their defaults. A config file changes what its run needs."""
    config = Config()
    for key, entry in KEYS.items():
        *sections, name = key.split(".")
        place = config
        for depth, section in enumerate(sections, start=1):
            if section not in place:
                # A mapping stays one value where a section holds one; elsewhere it is a section.
                prefix = ".".join(sections[:depth])
                inner = Config(convert_dict=prefix not in _WITH_MAPPINGS)
                place[section] = inner.with_section(prefix)
            place = place[section]
        default = placeholder(bool) if entry.default is None else entry.default
        place[name] = dict(default) if isinstance(default, dict) else default
    return config


MAPPINGS = {key: entry.example for key, entry in KEYS.items() if isinstance(entry.default, dict)}
"""Keys whose values are mappings with names that are not ours, and a value as an example."""

_WITH_MAPPINGS = {key.rpartition(".")[0] for key in MAPPINGS}


def flat_pairs(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return keys, with their sections joined by dots, and values, in the order of a mapping."""
    flat: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, dict) and f"{prefix}{key}" not in MAPPINGS:
            flat += flat_pairs(value, f"{prefix}{key}.")
        else:
            flat.append((f"{prefix}{key}", with_tuples(value)))
    return flat


def with_tuples(value: Any) -> Any:
    """Return a value with lists, also nested ones, as the tuples that a configuration holds."""
    if not isinstance(value, list | tuple):
        return value
    return tuple(
        {key: with_tuples(inside) for key, inside in item.items()}
        if isinstance(item, dict)
        else with_tuples(item)
        for item in value
    )


def flatten(config: ConfigDict) -> dict[str, Any]:
    """Return every value by its key, with sections joined by dots."""
    return dict(flat_pairs(config.to_dict()))


def flat_json(path: Path) -> dict[str, Any]:
    """Return the values of a workdir's `config.json` by key, with sections joined by dots."""
    return dict(flat_pairs(read_object(path)))


def to_json(config: ConfigDict) -> str:
    """Return the configuration as JSON, for `config.json` of the workdir."""
    return json.dumps(config.to_dict(), indent=2, ensure_ascii=False) + "\n"
