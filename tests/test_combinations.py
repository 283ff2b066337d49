"""Random valid combinations of all settings of a method, each through two complete steps."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from configs import bapo_small, dapo_small, passk_small, search_r1_small
from jaxrl.builders.validation import validate
from jaxrl.config.schema import KL_CONTROLLERS, flatten_config
from jaxrl.logs.display import Display
from jaxrl.models.hf_weights import load_hf
from jaxrl.objectives.advantages import ESTIMATORS
from jaxrl.objectives.aggregation import AGGREGATIONS
from jaxrl.objectives.kl import KL_ESTIMATORS
from jaxrl.run import run
from jaxrl.training.controllers import Controllers
from jaxrl.training.method import has_kl_loss
from jaxrl.training.optimizer import make_schedule
from tests.helpers import UPDATE_PROGRAMS, settings_of
from tests.runs import (
    METHOD_SIZES,
    Sampler,
    base_config,
    records,
    saved_progress,
)

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size")

SEEDS, MORE_SEEDS = range(1), range(1, 52)
# Choices that only make sense with others bring them along.
GATED = {"shaping.boundary_aware": True, "eval.every_steps": 1, "eval.suites": ("greedy",)}
GSPO = {
    "loss.name": "gspo",
    "loss.aggregation": "seq-mean-token-mean",
    "loss.clip.dual_clip": 0.0,
}
IN_REWARD = {
    "kl.apply_to": "reward",
    "kl.coef": 0.05,
    "kl.estimator": "k1",
    "kl.anchor": "ref",
    "kl.low_factor": 1.0,
    "kl.second_chance": False,
}
FINAL_REWARD = {**IN_REWARD, "filter.name": "varied", "filter.key": "seq_final_reward"}
NO_SHAPING = {
    "shaping.overlong_buffer": 0,
    "shaping.boundary_aware": False,
    "shaping.entropy_reward": False,
    "kl.apply_to": "loss",
    "advantage.reinforce_plus_plus.baseline": False,
}
PASS_AT_K = [
    {**NO_SHAPING, "advantage.name": name} for name in ESTIMATORS if name.startswith("pass_at_k")
]
GROUP_RELATIVE = [
    {"advantage.name": "grpo", "advantage.reinforce_plus_plus.baseline": False},
    {"advantage.name": "rloo", "advantage.reinforce_plus_plus.baseline": False},
    {"advantage.name": "reinforce_plus_plus", "advantage.reinforce_plus_plus.baseline": False},
    {"advantage.name": "reinforce_plus_plus", "advantage.reinforce_plus_plus.baseline": True},
]


def options(key, values):
    return [{key: value} for value in values]


# The settings of a method. Each is drawn independently.
DIMENSIONS = [
    [*GROUP_RELATIVE, *GROUP_RELATIVE, *PASS_AT_K],
    options("advantage.pass_at_k.k", (1, 2)),
    options("advantage.grpo.normalize_std", (True, False)),
    options("advantage.grpo.ddof", (0, 1)),
    options("loss.aggregation", AGGREGATIONS),
    [{"loss.name": "clip"}, {"loss.name": "cispo", "loss.clip.dual_clip": 0.0}, GSPO],
    options("loss.clip_high", (0.2, 0.28)),
    options("loss.clip.dual_clip", (0.0, 3.0)),
    options("loss.entropy_coef", (0.0, 0.01)),
    options("loss.mask_observations", (True, True, False)),
    options("loss.old_logprobs", ("trainer", "trainer", "sampler")),
    options("loss.correction.level", ("none", "token", "sequence")),
    options("loss.correction.mode", ("truncate", "mask")),
    options("kl.coef", (0.0, 0.05, 0.05)),
    options("kl.estimator", KL_ESTIMATORS),
    options("kl.anchor", ("ref", "ref", "old")),
    [{"kl.apply_to": "loss"}, IN_REWARD],
    options("kl.controller", KL_CONTROLLERS),
    options("kl.low_factor", (1.0, 0.5)),
    options("kl.second_chance", (False, True)),
    options("filter.name", ("none", "varied", "range")),
    [*options("filter.key", ("acc", "score", "seq_reward")), FINAL_REWARD],
    options("filter.tasks_per_batch", (0, 3)),
    options("filter.carry_over", (False, True)),
    options("filter.resample_attempts", (0, 1)),
    options("filter.resample_early", (False, True)),
    options("filter.skip_solved", (False, True)),
    options("filter.skip_entropy", (0.1, 10.0)),
    options("shaping.overlong_buffer", (0, 16)),
    [{"shaping.boundary_aware": False, "eval.every_steps": 0, "eval.suites": ()}, GATED],
    options("shaping.stage_level", (True, False)),
    options("shaping.sample_level", (True, False)),
    options("shaping.stage_tolerance", (0, 5)),
    options("shaping.entropy_reward", (False, True)),
    options("shaping.centered_gain", (False, True)),
    options("shaping.entropy_window", (2, 4)),
    options("shaping.bootstrap_tasks", (0, 3)),
    options("optimizer.num_minibatches", (1, 2)),
    options("optimizer.num_epochs", (1, 2)),
    options("optimizer.skip_signal_free", (True, False)),
    options("rollout.top_p", (1.0, 0.9)),
    options("rollout.temperature", (1.0, 0.7)),
    options("reward.correct", ("exact_match", "f1")),
    options("reward.weights", ({"exact_match": 1.0}, {"exact_match": 1.0, "format": 0.5})),
]


def is_valid(config):
    try:
        validate(config)
    except ValueError:
        return False
    return True


def combination(seed, config):
    """Return a valid configuration with random settings of the method.

    Options are drawn in random order. One that validation refuses beside the others is reverted,
    and tried again at the end, when the options that it needs may have been drawn.
    """
    rng = np.random.default_rng(seed)
    dimensions = [DIMENSIONS[index] for index in rng.permutation(len(DIMENSIONS))]
    drawn = [dimension[rng.integers(len(dimension))] for dimension in dimensions]
    for option in [*drawn, *drawn]:
        before = {key: _get(config, key) for key in option}
        if before == option:
            continue
        config.update_from_flattened_dict(option)
        if not is_valid(config):
            config.update_from_flattened_dict(before)
    validate(config)
    return config


def changed_keys(config, base):
    """Return the keys of a combination that differ from its base."""
    before = flatten_config(base)
    return {key: value for key, value in flatten_config(config).items() if value != before[key]}


def _get(config, key):
    section, _, name = key.rpartition(".")
    return config[section][name] if section.count(".") == 0 else _get(config, section)[name]


@pytest.fixture(scope="module")
def sampler(tiny_world, warm_model):
    return Sampler(base_config(tiny_world, warm_model))


def train_two_steps(seed, world, warm_model, sampler, workdir):
    config = combination(seed, base_config(world, warm_model))
    # pytest shows it on failure.
    print(f"combination {seed}: {changed_keys(config, base_config(world, warm_model))}")
    components = sampler.for_config(config)
    run(settings_of(config), workdir, components, Display())

    _, *steps = records(workdir)
    assert [record["step"] for record in steps] == [1, 2]
    updates = config.optimizer.num_minibatches * config.optimizer.num_epochs
    for number, record in enumerate(steps, 1):
        assert 3 <= record["perf/num_compilations/update"] <= UPDATE_PROGRAMS
        assert record["actor/num_skipped"] == 0
        assert record["actor/num_updates"] == number * updates
        settings = components.stages["train"].settings
        rate = make_schedule(settings)(number * updates - 1)  # of the last of its updates
        assert record["actor/lr"] == pytest.approx(float(rate), rel=1e-6)
        assert math.isfinite(record["actor/grad_norm"])
        assert math.isfinite(record["critic/rewards/mean"])
        if record["rollout/informative_share"] or not config.optimizer.skip_signal_free:
            measured = {name for name in record if name.startswith(("actor/", "rollout_corr/"))}
            assert not [name for name in measured if record[name] is None]
        assert ("actor/kl_loss" in record) == has_kl_loss(config.kl)
        assert ("rollout_corr/weight_mean" in record) == (config.loss.correction.level != "none")
        if not config.filter.carry_over:  # carried groups are those of an earlier policy
            assert record["rollout_corr/logprob_diff_max"] in (None, pytest.approx(0, abs=1e-3))

    progress, weights = saved_progress(components, workdir)
    expected = Controllers.init(components.method)
    for field in dataclasses.fields(Controllers):
        state, wanted = (getattr(x, field.name) for x in (progress.controllers, expected))
        assert type(state) is type(wanted)
        shown = [name for name in steps[-1] if name.startswith(f"controller/{field.name}/")]
        assert bool(shown) == (state is not None)
    logged = {name: x for name, x in steps[-1].items() if name.startswith("controller/")}
    assert progress.controllers.metrics() == logged

    exported, before = load_hf(workdir / "export"), load_hf(warm_model)
    jax.tree.map(np.testing.assert_array_equal, exported, jax.device_get(weights))
    pairs = zip(jax.tree.leaves(exported), jax.tree.leaves(before), strict=True)
    has_moved = any(not np.array_equal(*pair) for pair in pairs)
    assert has_moved == any(record["actor/grad_norm"] > 0 for record in steps)
    if any(record["rollout/informative_share"] for record in steps):
        assert has_moved
    elif not (has_kl_loss(config.kl) or config.loss.entropy_coef):
        assert not has_moved


@pytest.mark.minutes
@pytest.mark.parametrize("seed", SEEDS)
def test_random_combinations_train(seed, tiny_world, warm_model, sampler, tmp_path):
    train_two_steps(seed, tiny_world, warm_model, sampler, tmp_path)


@pytest.mark.slow(instead="test_combinations.py::test_random_combinations_train")
@pytest.mark.parametrize("seed", MORE_SEEDS)
def test_many_more_random_combinations_train(seed, tiny_world, warm_model, sampler, tmp_path):
    train_two_steps(seed, tiny_world, warm_model, sampler, tmp_path)


SMALL_CONFIGS = {
    search_r1_small: {"actor/kl_loss", "actor/entropy"},
    dapo_small: {"reward/overlong/mean", "filter/kept_share"},
    bapo_small: {
        *("reward/abstention/mean", "controller/gate/is_late", "filter/resampled_groups"),
        "num_python_calls/mean",
    },
    passk_small: {"advantage/k"},
}
"""Small versions of published configurations, and metrics that show their method.

`test_controllers_in_runs.py` trains with the method of ARES.
"""


@pytest.mark.minutes
@pytest.mark.parametrize("module", SMALL_CONFIGS, ids=lambda module: module.__name__)
def test_the_small_configurations_train(module, tiny_world, warm_model, sampler, tmp_path):
    config = module.get_config(str(tiny_world))
    sizes = METHOD_SIZES | {"model.path": warm_model, "eval.suites": config.eval.suites}
    sizes |= {"rollout.max_num_seqs": 16, "rollout.max_turns": 2, "optimizer.num_minibatches": 1}
    sizes["rollout.max_prompt_tokens"] = 32
    sizes |= {"filter.max_batches": 0, "checkpoint.every_steps": 1, "eval.samples": 1}
    if config.filter.tasks_per_batch:
        sizes["filter.tasks_per_batch"] = 4
    if config.advantage.name == "pass_at_k":
        sizes["advantage.pass_at_k.k_schedule"] = ((0, 2), (1, 1))
    if config.shaping.overlong_buffer:
        sizes["shaping.overlong_max_tokens"] = 80
    if config.env.name == "math":  # like the others it searches, with rewards by chance
        sizes |= {"env.name": "search", "search.local.corpus": f"{tiny_world}/corpus.jsonl"}
        sizes |= {"reward.correct": "exact_match", "reward.weights": {"exact_match": 1.0}}
    config.update_from_flattened_dict(sizes)
    validate(config)
    run(settings_of(config), tmp_path, sampler.for_config(config), Display())
    _, *steps = records(tmp_path)
    assert len(steps) == 2
    assert any(record["rollout/informative_share"] for record in steps)
    for record in steps:
        assert record.keys() >= SMALL_CONFIGS[module]
        assert math.isfinite(record["actor/grad_norm"])
    if config.advantage.name == "pass_at_k":
        assert [record["advantage/k"] for record in steps] == [2, 1]


def test_every_option_is_drawn(tiny_world):
    """No rule hides an option from the generator, nor do these seeds leave one out."""
    missing = [option for dimension in DIMENSIONS for option in dimension]
    for seed in (*SEEDS, *MORE_SEEDS):
        drawn = flatten_config(combination(seed, base_config(tiny_world)))
        missing = [option for option in missing if not option.items() <= drawn.items()]
        if not missing:
            break
    assert not missing, missing
