"""Combinations of settings: those refused, those accepted, and the published methods."""

from functools import partial

import pytest

from configs import (
    ares,
    ares_looking,
    ares_small,
    bapo,
    bapo_small,
    dapo,
    dapo_small,
    mixed_small,
    passk,
    passk_small,
    search_r1,
    search_r1_brief,
    search_r1_small,
    search_r1_stable,
)
from jaxrl.builders.validation import validate
from jaxrl.config.schema import default_config, flatten_config
from tests import helpers
from tests.helpers import resolved

METHODS = (search_r1, search_r1_brief, search_r1_stable, dapo, bapo, ares, passk)
SMALL = (search_r1_small, dapo_small, bapo_small, ares_small, ares_looking, passk_small)


def between(low, high):
    """Return a filter by accuracy, both ends excluded."""
    return {
        "filter.name": "range",
        "filter.range.low": low,
        "filter.range.high": high,
    }


GATED = {"shaping.boundary_aware": True, "eval.every_steps": 1}
ENDPOINT = {
    **{"policy.name": "openai", "policy.openai.url": "http://127.0.0.1:8000/v1"},
    **{"policy.openai.model": "m", "stages": ("evaluate",)},
}
CORRECTED = {"loss.correction.level": "token", "loss.correction.mode": "mask"}
MATH = {"env.name": "math", "eval.final_suites": ("greedy",), "reward.correct": "math"}
JUDGED = {
    "reward.judges": {"helpful": {"url": "http://j", "model": "j", "prompt": "{response}"}},
    "reward.weights": {"helpful": 1.0},
}
PASS_AT_K = {"advantage.name": "pass_at_k"}
FULL_SAMPLING = {"advantage.name": "pass_at_k_full_sampling"}
K1_REWARD = {"kl.coef": 0.1, "kl.apply_to": "reward", "kl.estimator": "k1"}
ADAPTIVE = {"kl.coef": 0.1, "kl.controller": "adaptive"}
VARIED = {"filter.name": "varied"}
FINAL_REWARD = VARIED | {"filter.key": "seq_final_reward"}
UNFINISHED = {"filter.unfinished_tasks": 1, "loss.correction.level": "token"}
AGENTS = {
    **{"env.name": "agents", "eval.final_suites": ("greedy",), "reward.weights": {"reward": 1.0}},
    "filter.resample_attempts": 1,
}
BROKEN = [
    ("policy.name", ENDPOINT | {"stages": ("sft", "evaluate")}),
    ("rollout.overlong_prompts", ENDPOINT | {"rollout.overlong_prompts": "truncate_left"}),
    ("model.replay", ENDPOINT | {"model.replay": True}),
    ("ledger.max_cost", {"ledger.max_cost": 1.0}),
    ("prompt.template", {"prompt.template": "{question}!", "prompt.template_file": "a.jinja"}),
    ("model.head_dtype", {"model.head_dtype": "float32"}),
    ("mesh.rollout_devices", {"mesh.rollout_devices": 1}),
    ("model.lora.path", {"model.lora.path": "adapter"}),
    ("model.lora.targets", {"model.lora.rank": 8, "model.lora.targets": ()}),
    ("images.max_pixels", {"images.min_pixels": 64, "images.max_pixels": 32}),
    ("num_epochs", {"num_epochs": 2}),
    ("tasks.eval.holdout", {"tasks.eval.holdout": 0.1}),
    ("num_epochs", {"num_steps": 0}),
    ("search.web.url", {"search.engine": "web", "search.web.provider": "searxng"}),
    ("loss.term.name", {"loss.term.name": "llds"}),
    ("eval.suites", {"env.name": "math", "eval.suites": ("empty_search",)}),
    ("eval.final_suites", {"env.name": "math"}),
    ("env.step_deadline_s", {"env.step_deadline_s": 400.0}),
    ("eval.suites", {"search.engine": "empty", "eval.suites": ("random_search",)}),
    ("eval.final_suites", {"search.engine": "http", "eval.final_suites": ("random_search",)}),
    ("rollout.max_cost", {"rollout.max_cost": 1.0, "ledger.prices": {"helpful": 1.0}} | JUDGED),
    ("rollout.max_cost", MATH | {"rollout.max_cost": 1.0, "ledger.prices": {"search": 1.0}}),
    ("rollout.max_calls", MATH | {"rollout.max_calls": 3}),
    ("rollout.group_size", {"rollout.group_size": 1}),
    ("advantage.pass_at_k", FULL_SAMPLING | {"advantage.pass_at_k.k": 5}),
    ("advantage.pass_at_k", PASS_AT_K | {"advantage.pass_at_k.k_schedule": ((0, 1), (60, 8))}),
    ("shaping", PASS_AT_K | {"shaping.overlong_buffer": 8}),
    ("kl.apply_to", PASS_AT_K | K1_REWARD),
    ("advantage.by_turn", PASS_AT_K | {"advantage.by_turn": True}),
    ("advantage.turn_discount", {"advantage.turn_discount": 0.5}),
    ("loss.aggregation", {"loss.name": "gspo"}),
    ("loss.mask_observations", CORRECTED | {"loss.mask_observations": False}),
    ("loss.correction.level", CORRECTED | {"loss.name": "dppo", "loss.dppo.anchor": "rollout"}),
    ("loss.correction.level", CORRECTED | {"loss.old_logprobs": "sampler"}),
    ("loss.correction.level", {"rollout.async_level": 1}),
    ("loss.correction.mode", {"loss.correction.level": "geometric"}),
    ("loss.correction.low", CORRECTED | {"loss.correction.low": 1.5}),
    ("loss.correction.high", CORRECTED | {"loss.correction.high": 0.9}),
    ("kl.low_factor", {"kl.low_factor": 0.5}),
    ("kl.anchor", ADAPTIVE | {"kl.anchor": "old"}),
    ("kl.estimator", {"kl.coef": 0.1, "kl.apply_to": "reward"}),
    ("kl.apply_to", K1_REWARD | {"kl.controller": "budget"}),
    ("kl.adaptive.horizon", ADAPTIVE | {"kl.adaptive.horizon": 127}),  # of 16 × 8 trajectories
    ("kl.coef", {"kl.coef": 1e-5, "kl.controller": "log"}),
    ("filter.carry_over", {"filter.carry_over": True}),
    ("rollout.max_prompt_tokens", {"rollout.max_total_tokens": 512}),
    ("filter.range.low", between(0.99, 0.99)),
    ("filter.resample_early", {"filter.resample_early": True, "filter.resample_attempts": 2}),
    ("filter.key", FINAL_REWARD),
    ("filter.key", VARIED | {"filter.key": "exact_mach"}),
    ("filter.key", {"filter.key": "f1"}),  # without a filter
    (
        "filter.key",
        FINAL_REWARD | K1_REWARD | {"rollout.async_level": 1, "loss.correction.level": "token"},
    ),
    ("filter.max_batches", VARIED | {"filter.tasks_per_batch": 1, "filter.max_batches": 2}),
    ("sft.source", {"stages": ("sft",)}),
    ("filter.name", GATED | VARIED),
    ("filter.name", GATED | {"filter.name": "range"}),
    ("filter.unfinished_tasks", UNFINISHED | {"model.replay": True}),
    ("filter.unfinished_tasks", UNFINISHED | AGENTS),
    ("shaping.overlong_buffer", {"shaping.overlong_buffer": 1025}),
    ("shaping.boundary_aware", GATED | {"env.name": "math", "eval.final_suites": ("sampled",)}),
    ("reward.weights", GATED | {"reward.weights": {"format": 0.5}}),
    ("shaping.stage_level", GATED | {"shaping.stage_level": False}),
    ("eval.every_steps", {"shaping.boundary_aware": True}),
    ("shaping.centered_gain", {"shaping.centered_gain": True}),
    ("shaping.alpha_init", {"shaping.entropy_reward": True, "shaping.alpha_init": 2.5}),
    ("shaping.bootstrap_tasks", {"shaping.bootstrap_tasks": 1}),
    ("shaping.trigger_words", {"shaping.trigger_words": ("wait",)}),
]
"""The key that is refused, and settings for which it is."""


PATHS = ("model.path", "tasks.train.source", "tasks.eval.source", "search.local.corpus")
settings = partial(helpers.settings, **dict.fromkeys(PATHS, "x"))


@pytest.mark.parametrize(("key", "changes"), BROKEN)
def test_combinations_that_make_no_sense_are_refused(key, changes):
    with pytest.raises(ValueError, match=rf"^config\.{key} is .*; expected "):
        validate(settings(**changes))


@pytest.mark.parametrize("module", METHODS + SMALL, ids=lambda module: module.__name__)
def test_shipped_methods_are_valid(module):
    validate(module.get_config())


@pytest.mark.parametrize("setup", dapo.SETUPS)
def test_the_setups_of_dapo_are_valid(setup):
    validate(dapo.get_config(setup), needs_data=False)


@pytest.mark.parametrize("module", SMALL, ids=lambda module: module.__name__)
def test_a_small_config_keeps_the_method(module):
    """Sizes may differ; of what the method chooses, every key it sets stays as it is published."""
    published = default_config()
    module.set_method(published)
    small = flatten_config(module.get_config())
    sizes = {
        "advantage.pass_at_k.k_schedule",
        "shaping.overlong_buffer",
        "shaping.overlong_max_tokens",
        "filter.tasks_per_batch",
        "shaping.bootstrap_tasks",
        "shaping.stage_tolerance",
    }
    method = ("advantage.", "loss.", "kl.", "shaping.", "filter.")
    chosen = {key: x for key, x in flatten_config(published).items() if key.startswith(method)}
    assert {key: small[key] for key in chosen.keys() - sizes} == {
        key: chosen[key] for key in chosen.keys() - sizes
    }


@pytest.mark.parametrize(
    "changes",
    [
        # ARES's masks, DAPO's filter and Pass@k's advantages in one configuration.
        {
            "advantage.name": "pass_at_k", "filter.name": "varied", "kl.coef": 0.01,
            "kl.low_factor": 0.5, "kl.controller": "budget", "loss.clip_high": 0.28,
        },
        {"advantage.name": "reinforce_plus_plus", "rollout.group_size": 1},
        # k itself is not read where it has a schedule.
        PASS_AT_K
        | {"advantage.pass_at_k.k": 9, "advantage.pass_at_k.k_schedule": ((0, 7), (60, 1))},
        {"loss.name": "gspo", "loss.aggregation": "seq-mean-token-mean"},
        K1_REWARD | {"kl.controller": "adaptive"},
        GATED | VARIED | {"filter.key": "seq_reward"},
        {"filter.resample_attempts": 1},
        GATED | {"filter.resample_attempts": 1, "filter.resample_early": True},
        between(0.37, 0.5),
        between(-1.0, 2.5) | {"filter.key": "answer"},
        VARIED | JUDGED | {"filter.key": "helpful"},
        ADAPTIVE | {"kl.adaptive.horizon": 128},
    ],
    ids=str,
)  # fmt: skip
def test_combinations_that_make_sense_are_accepted(changes):
    validate(settings(**changes))


CLIP = ("loss.clip_low", "loss.clip_high")
TO_REF = {"kl.estimator": "k3", "kl.anchor": "ref", "kl.apply_to": "loss"}
E5 = {
    "search.engine": "dense", "search.dense.corpus": "data/wiki18/corpus.jsonl",
    "search.dense.encoder": "models/e5-base-v2", "search.dense.query_prefix": "query: ",
    "search.dense.passage_prefix": "passage: ",
}  # fmt: skip
"""What both search methods asked: Wikipedia of 2018, by the inner products of E5-base-v2."""
PUBLISHED = {
    search_r1: {
        "rollout.group_size": 5, "rollout.temperature": 1.0, "optimizer.lr": 1e-6,
        "optimizer.warmup_steps": round(0.285 * 2 * 1005), "kl.coef": 0.001, **TO_REF,
        **dict.fromkeys(CLIP, 0.2), "loss.entropy_coef": 0.001, "loss.aggregation": "token-mean",
        "rollout.max_response_tokens": 500, "rollout.max_observation_tokens": 500,
        "rollout.max_prompt_tokens": 2048, "rollout.max_total_tokens": 4096, **E5,
        "search.dense.topk": 3,
        "rollout.tasks_per_step": 512, "optimizer.num_minibatches": 512 // 256, "num_steps": 1005,
        "rollout.max_turns": 2, "advantage.grpo.ddof": 0, "advantage.grpo.epsilon": 1e-8,
    },
    dapo: {
        "rollout.group_size": 16, "rollout.tasks_per_step": 512, "filter.tasks_per_batch": 1536,
        "optimizer.num_minibatches": 16, "rollout.max_prompt_tokens": 2048,
        "rollout.max_response_tokens": 20480, "optimizer.lr": 1e-6, "optimizer.weight_decay": 0.1,
        "optimizer.schedule": "constant", "optimizer.warmup_steps": 20 * 16,
        "optimizer.grad_clip": 1.0, "loss.entropy_coef": 0.0, "kl.coef": 0.0,
        "rollout.temperature": 1.0, "rollout.top_p": 1.0, "eval.top_p": 0.7, "eval.samples": 32,
        "loss.clip_low": 0.2, "loss.clip_high": 0.28, "loss.clip.dual_clip": 10.0,
        "loss.aggregation": "token-mean", "filter.key": "acc", "filter.max_batches": 10,
        "shaping.overlong_buffer": 4096, "shaping.overlong_factor": 1.0,
        "rollout.overlong_prompts": "truncate_left",
    },
    bapo: {
        "rollout.group_size": 8, "rollout.tasks_per_step": 64, "optimizer.num_minibatches": 4,
        "optimizer.lr": 1e-6, "num_steps": 2 * 5000 // 64, **dict.fromkeys(CLIP, 0.1),
        "kl.coef": 0.001, **TO_REF, "rollout.temperature": 1.0, "rollout.max_prompt_tokens": 1536,
        "rollout.max_total_tokens": 1536 + 8192, **E5, "search.dense.topk": 5,
        "rollout.max_turns": 3,
        "eval.every_steps": 1, "shaping.abstention_bonus": 0.5, "shaping.abstention_rate": 0.05,
        "shaping.stage_tolerance": 5, "filter.resample_attempts": 2, "filter.resample_early": False,
    },
    ares: {
        "rollout.group_size": 8, "rollout.temperature": 1.0, "rollout.top_p": 0.99,
        "eval.temperature": 0.5, "eval.samples": 1, "rollout.tasks_per_step": 512,
        "optimizer.num_minibatches": 512 // 128, "rollout.max_prompt_tokens": 4096,
        "rollout.max_response_tokens": 8192, "optimizer.lr": 1e-6, "optimizer.weight_decay": 0.01,
        "optimizer.warmup_steps": 0, "optimizer.grad_clip": 1.0, "loss.clip_low": 0.2,
        "loss.clip_high": 0.3, "loss.clip.dual_clip": 3.0, "loss.aggregation": "token-mean",
        "kl.coef": 0.01, **TO_REF, "kl.low_factor": 0.5, "kl.budget.step": 0.01,
        "kl.budget.budgets.easy": 0.05, "kl.budget.budgets.medium": 0.1,
        "kl.budget.budgets.hard": 0.2,
        "eval.every_steps": 5, "checkpoint.every_steps": 5, "shaping.bootstrap_tasks": -1,
        "shaping.entropy_window": 4, "shaping.entropy_percentile": 95.0, "shaping.alpha_init": 0.5,
        "shaping.alpha_step": 0.05,
        "filter.range.low": 0.01, "filter.range.high": 0.99,
        "filter.max_batches": 20, "num_steps": "50 epochs",
    },
    passk: {
        "rollout.group_size": 32, "rollout.tasks_per_step": 128, "optimizer.lr": 1e-6,
        "optimizer.warmup_steps": 10, "loss.clip_low": 0.2, "loss.clip_high": 0.28,
        "loss.aggregation": "token-mean", "kl.coef": 0.0,
    },
}  # fmt: skip
DIFFERING = {
    search_r1: {"rollout.max_response_tokens"},
    dapo: {"optimizer.warmup_steps"},
    bapo: {"shaping.abstention_rate", "filter.resample_early"},
    ares: {"shaping.bootstrap_tasks", "num_steps"},
    passk: set(),
}
"""Keys with another value than the publication; the docstrings say why."""


@pytest.mark.parametrize("module", PUBLISHED, ids=lambda module: module.__name__)
def test_hyperparameters_are_those_of_the_publication(module):
    flat = flatten_config(module.get_config())
    differing = {key for key, value in PUBLISHED[module].items() if flat[key] != value}
    assert differing == DIFFERING[module]


def test_reward_parts_of_no_environment_are_known_by_name(monkeypatch):
    config = helpers.settings(**{"model.path": "a", "reward.correct": "math_verify"})
    config.reward.weights = {"exact_match": 1.0}
    resolved = validate(config, needs_data=False)
    assert [*resolved.reward_parts] == ["math_verify"]
    assert resolved.reward_weights == {"exact_match": 1.0}
    assert resolved.correctness_part == "exact_match"  # of the environment
    config.reward.weights = {"math_verfy": 1.0}
    with pytest.raises(ValueError, match="no reward part 'math_verfy'; did you mean 'math_verify'"):
        validate(config, needs_data=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    config.reward.weights = {"math_verify": 1.0}
    with pytest.raises(ValueError, match=r"names 'math_verify', but .* pip install -e '.\[math\]"):
        validate(config, needs_data=False)


def test_reward_functions_are_named_by_their_last_part_where_unique():
    verl = "tests.extending.my_verl_reward"
    weights = {f"{verl}.compute_score": 1.0, f"{verl}:compute_score": 2.0}
    weights |= {"tests.extending.my_reward.brevity": 3.0}
    config = helpers.settings(**{"reward.weights": weights})
    assert resolved(config).reward_weights == {
        f"{verl}.compute_score": 1.0, f"{verl}:compute_score": 2.0, "brevity": 3.0,
    }  # fmt: skip


MATH_KEYS = "environments.math"


@pytest.mark.parametrize(
    ("key", "changes", "overrides"),
    [
        # Each environment is a configuration of its own.
        (f"{MATH_KEYS}.tasks.train.source", {}, {"tasks.train.source": ""}),
        (f"{MATH_KEYS}: config.reward.correct", {}, {"reward.correct": "f1"}),
        (f"{MATH_KEYS}: config.rollout.max_calls", {"rollout.max_calls": 3}, {}),
        (f"{MATH_KEYS}: config.sft.source", {}, {"sft.source": ""}),
        # What several environments cannot share.
        (f"{MATH_KEYS}.env.name", {}, {"env.name": "agents"}),
        ("sft.source", {"sft.source": "all.jsonl"}, {}),
        ("advantage.name", {"advantage.name": "reinforce_plus_plus"}, {}),
        ("advantage.name", {"advantage.name": "pass_at_k_entropy_guided"}, {}),
        ("shaping.entropy_reward", {"shaping.entropy_reward": True}, {}),
        ("kl.controller", {"kl.coef": 0.1, "kl.controller": "budget"}, {}),
        ("kl.low_factor", {"kl.coef": 0.1, "kl.low_factor": 0.5}, {}),
        ("shaping.overlong_max_tokens", {"shaping.overlong_buffer": 8}, {}),
        ("eval.final_suites", {"eval.final_suites": ("random_search",)}, {"env.name": "search"}),
    ],
)
def test_environments_that_do_not_fit_are_refused(key, changes, overrides):
    config = mixed_small.get_config()
    config.update_from_flattened_dict(changes)
    environments = dict(config.environments)
    environments["math"] = environments["math"] | overrides
    if overrides.get("env.name") == "search":  # no environment has a corpus
        environments["math"] |= {"search.engine": "empty", "reward.weights": {"f1": 1.0}}
        environments["math"] |= {"reward.correct": "f1"}
        environments["search"] = environments["search"] | {"search.engine": "empty"}
    config.environments = environments
    with pytest.raises(ValueError, match=rf"^config\.{key} is .*; expected "):
        validate(config)


def test_the_example_of_environments_is_valid():
    c = validate(mixed_small.get_config())
    search, math = c.environments.values()
    assert (search.weight, math.weight) == (0.7, 0.3)
    assert (search.reward_weights, math.reward_weights) == ({"exact_match": 1.0}, {"math": 1.0})
    assert (search.is_multi_turn, math.is_multi_turn, c.is_multi_turn) == (True, False, True)
