"""User code that cannot be used is refused before the run, in one line that names the key."""

import sys

import pytest

from configs import debug_tiny
from jaxrl.builders.components import build_stages
from jaxrl.builders.validation import validate
from jaxrl.envs.base import Reward
from jaxrl.models.attention.reference import XLA
from jaxrl.models.policy import Model
from jaxrl.sampling.step_results import validate_reward
from tests.helpers import NUM_TOKENS, TINY, build, method_of, resolved, settings
from tests.toys import one_device_mesh

pytestmark = pytest.mark.usefixtures("quick_compilation")

WRONG = """
import dataclasses
import jax, jax.numpy as jnp, numpy as np
from jaxrl.envs.base import Env
from jaxrl.envs.protocol import search_r1
from jaxrl.envs.search.base import SearchEngine
from jaxrl.envs.search_env import SearchEnv
from jaxrl.envs.tools.base import Tool
from jaxrl.models.qwen import QwenConfig
from jaxrl.objectives.losses import PolicyLoss

def branches(rewards): return rewards if rewards[0] > 0 else -rewards
def mean(rewards): return rewards.mean()
def raises(rewards): raise RuntimeError("no idea\\nmore lines")
def ends(rewards): raise SystemExit(3)

def bare(logprobs): return logprobs
def loop(logprobs):
    return PolicyLoss(jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x + 1, logprobs), {})

def right(logprobs): return PolicyLoss(logprobs, {})
def log_ratio(log_ratios): return log_ratios
def constant(loss_mask): return PolicyLoss(loss_mask.astype("float32"), {})
def looped(log_ratios):
    return jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x + 1, log_ratios)

def summed(log_ratios): return log_ratios.sum()
def no_guard(token_counts): return np.where(token_counts, 1.0, np.nan)
def ending(peak): return lambda step: jnp.where(step < 3, peak, jnp.nan)
def short(rewards): return np.ones(3, bool)

def each(turns, answers): yield 1.0
def fails(response, answers): raise KeyError("no key")

class Bell(Tool):
    name, blank = "bell", ""
    def run(self, call): return ""
class Deaf(Bell):
    def run(self): return ""

class Down(SearchEngine):
    def __init__(self): raise OSError("down")
    def run(self, call): return ""

class Game(Env):
    stop_strings, reward_parts = ("</a>",), ("exact_match",)
    def start(self, tasks): return []
    def step(self, episodes, texts): return []
    def score(self, group): return []
class Comma(Game): stop_strings = ("</a>")
class Failing(Game):
    def __init__(self): raise ValueError("no game")
class Turned(Game):
    def __init__(self): self.reward_parts = ("f1",)

def no_tools(): return search_r1()
def no_tuple(tools): return dataclasses.replace(search_r1(tools), stop_strings="</search>")

class Empty(QwenConfig):
    @classmethod
    def from_dict(cls, fields, *, source=""): return None
"""
FILES = {
    "wrong.py": WRONG,
    "unreadable.py": "def f(x: return\n",
    "lacking.py": "\nimport no_such_package\n",
    "ending.py": "raise SystemExit(1)\n",
}


@pytest.fixture
def beside_the_config(tmp_path, monkeypatch):
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    # Last, as `python -m` has it: what comes with Python hides a file of the same name.
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


WRONG_NAMES = {
    "advantage.name": "wrong.branches wrong.mean wrong.ends "
    "wrong.missing unreadable.f lacking.f ending.f",
    "loss.name": "wrong.bare wrong.loop",
    "loss.term.name": "wrong.bare",
    "loss.token_filter.name": "wrong.bare",
    "filter.trajectories": "wrong.raises",
    "kl.estimator": "wrong.summed",
    "loss.aggregation": "wrong.no_guard",
    "optimizer.schedule": "wrong.ending",
    "filter.name": "wrong.short",
    "env.name": "wrong.Comma wrong.Failing",
    "env.search.tools": "wrong.Bell,wrong.Bell wrong.Deaf",
    "reward.weights": "wrong.each wrong.fails",
    "env.search.protocol": "wrong.no_tools wrong.no_tuple",
    "model.architecture": "wrong.Empty",
    "search.engine": "wrong.Down",
}
"""Values of keys that name unusable code."""


def validate_and_build(config):
    validate(config)
    build(config)


@pytest.mark.parametrize(
    ("key", "name"), [(key, name) for key, names in WRONG_NAMES.items() for name in names.split()]
)
@pytest.mark.usefixtures("beside_the_config")
def test_unusable_code_is_refused_before_the_run(tiny_world, key, name):
    config = debug_tiny.get_config(str(tiny_world))
    config.stages = ("train",)
    config.reward.weights = {"exact_match": 1.0}
    config.kl.coef = 0.1  # without a KL term its estimator is not used
    values = {"env.search.tools": tuple(name.split(",")), "reward.weights": {name: 1.0}}
    config.update_from_flattened_dict({key: values.get(key, name)})
    with pytest.raises(ValueError, match=rf"^config\.{key.partition('.')[0]}\.") as refusal:
        validate_and_build(config)
    assert "\n" not in str(refusal.value)


@pytest.mark.usefixtures("beside_the_config")
def test_the_line_that_failed_is_named(tiny_world):
    config = debug_tiny.get_config(str(tiny_world))
    config.advantage.name = "wrong.raises"
    lines = WRONG.splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if text.startswith("def raises("))
    expected = rf"^config\.advantage\.name names 'wrong\.raises'.*no idea \(.*wrong\.py:{line}\)\.$"
    with pytest.raises(ValueError, match=expected):
        validate_and_build(config)


@pytest.mark.usefixtures("beside_the_config")
@pytest.mark.parametrize(
    ("loss", "estimator", "key"),
    [("right", "looped", "kl.estimator"), ("loop", "log_ratio", "loss.name")],
)
def test_of_several_functions_the_one_without_a_gradient_is_named(tiny_world, loss, estimator, key):
    config = debug_tiny.get_config(str(tiny_world))
    config.stages, config.kl.coef = ("train",), 0.1
    config.loss.term.name = "wrong.constant"  # in which nothing has a gradient
    config.loss.name, config.kl.estimator = f"wrong.{loss}", f"wrong.{estimator}"
    with pytest.raises(ValueError, match="Reverse-mode differentiation") as refusal:
        validate_and_build(config)
    assert str(refusal.value).startswith(f"config.{key} names ")


@pytest.mark.usefixtures("beside_the_config")
def test_an_environment_that_changes_its_reward_parts_is_refused(tiny_world):
    config = debug_tiny.get_config(str(tiny_world))
    config.env.name = "wrong.Turned"
    with pytest.raises(ValueError, match=r"^config.reward.weights names .*wrong.Turned"):
        build(config)


PARTS = """
from jaxrl.objectives.losses import PolicyLoss

def loss(logprobs, advantages):
    return PolicyLoss(-advantages * logprobs, {})

def gate(loss_mask):
    return loss_mask

def kl(log_ratios):
    return log_ratios**2"""


@pytest.mark.parametrize(
    ("key", "name", "shares"),
    [
        ("loss.clip_high", 0.3, True),
        ("loss.name", "parts.loss", False),
        ("loss.token_filter.name", "parts.gate", False),
        ("kl.estimator", "parts.kl", False),
    ],
)
def test_programs_with_user_code_are_traced_again(key, name, shares, tmp_path, monkeypatch):
    """It may have been edited and loaded again between two runs of a process."""
    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    config = settings(**{"stages": ("train",), "kl.coef": 0.1, "loss.term.coef": 0.1, key: name})
    model = Model(TINY, one_device_mesh(), XLA, num_tokens=NUM_TOKENS, remat="none")
    method = method_of(config)
    first, second = (
        build_stages(resolved(config), model, method)["train"].update for _ in range(2)
    )
    programs = [first.gradient.loop.program, second.gradient.loop.program]
    assert (programs[0]._jitted is programs[1]._jitted) == shares


@pytest.mark.parametrize("value", [None, float("nan"), "1"])
def test_the_part_of_a_reward_that_is_no_number_is_named(value):
    with pytest.raises(ValueError, match="the reward's 'theirs' is"):
        validate_reward(Reward(parts={"theirs": value}, final_answer="", total=float("nan")))
