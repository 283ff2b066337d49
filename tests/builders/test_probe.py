"""User code that cannot be used is refused before the run, in one line that names the key."""

import sys

import pytest

from configs import debug_tiny
from jaxrl.builders.components import build_stages
from jaxrl.builders.method import build_optimizer_settings
from jaxrl.builders.probe import probe_schedule
from jaxrl.builders.validation import validate
from jaxrl.envs.base import Reward
from jaxrl.models.attention.reference import XLA
from jaxrl.models.policy import Model
from jaxrl.sampling.step_results import validate_reward
from jaxrl.training.optimizer import SCHEDULES
from tests.helpers import (
    NUM_TOKENS,
    TINY,
    build,
    method_of,
    resolved,
    settings,
)
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
from jaxrl.models.architecture import Architecture
from jaxrl.models.qwen import QwenConfig
from jaxrl.objectives.losses import PolicyLoss

def branches(rewards): return rewards if rewards[0] > 0 else -rewards
def on_host(rewards): return np.asarray(rewards)
def nothing(rewards): pass
def mean(rewards): return rewards.mean()
def whole(group_ids): return group_ids
def raises(rewards): raise RuntimeError("no idea\\nmore lines")
def ends(rewards): raise SystemExit(3)
async def later(rewards): return rewards
class Kind: pass

def bare(logprobs): return logprobs
def scalar(logprobs): return PolicyLoss(logprobs.mean(), {})
def number(logprobs): return PolicyLoss(logprobs, {"x": 1.0})
def counts(logprobs): return PolicyLoss(jnp.zeros(logprobs.shape, int), {})
def loop(logprobs):
    return PolicyLoss(jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x + 1, logprobs), {})
def in_numpy(logprobs): return PolicyLoss(np.exp(logprobs), {})

def right(logprobs): return PolicyLoss(logprobs, {})
def log_ratio(log_ratios): return log_ratios
def constant(loss_mask): return PolicyLoss(loss_mask.astype("float32"), {})
def looped(log_ratios):
    return jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x + 1, log_ratios)

def branching(log_ratios): return log_ratios if log_ratios.sum() > 0 else -log_ratios
def summed(log_ratios): return log_ratios.sum()

def halves(token_counts): return np.ones(2)
def no_guard(token_counts): return np.where(token_counts, 1.0, np.nan)
def against(token_counts): return -1 / max(token_counts.sum(), 1)
def sum_of_none(token_counts): raise ZeroDivisionError("no tokens")

def by_branch(peak, num_updates): return lambda step: peak if step < num_updates else 0.0
def endless(peak): return lambda step: peak / 0 * step
def grown(peak): return lambda step: peak * jnp.ones(2)
def ending(peak): return lambda step: jnp.where(step < 3, peak, jnp.nan)
def sinking(peak): return lambda step: peak * (1.5 - step)

def indices(rewards): return np.arange(len(rewards))
def short(rewards): return np.ones(3, bool)

def one(text): return 1.0
def places(response, answers, /): return 1.0
def each(turns, answers): yield 1.0
def fails(response, answers): raise KeyError("no key")
def text(response, answers): return "1"

class Bell(Tool):
    name, blank = "bell", ""
    def run(self, call): return ""
class Twin(Bell): pass
class Spaced(Bell): name = "a bell"
class Deaf(Bell):
    def run(self): return ""
class Late(Bell):
    async def run(self, call): return ""
class Broken(Bell):
    def __init__(self): raise OSError("no bell")

class Finder(SearchEngine):
    name = "find"
    def run(self, call): return ""
class Down(SearchEngine):
    def __init__(self): raise OSError("down")
    def run(self, call): return ""
class Silent(SearchEngine):
    def run(self, call): return None

class Game(Env):
    stop_strings, reward_parts = ("</a>",), ("exact_match",)
    def start(self, tasks): return []
    def step(self, episodes, texts): return []
    def score(self, group): return []
class Comma(Game): stop_strings = ("</a>")
class Hollow(Env):
    stop_strings, reward_parts = ("</a>",), ("exact_match",)
class Failing(Game):
    def __init__(self): raise ValueError("no game")
class Turned(Game):
    def __init__(self): self.reward_parts = ("f1",)

def no_tools(): return search_r1()
def no_protocol(tools): return "search_r1"
def no_tuple(tools): return dataclasses.replace(search_r1(tools), stop_strings="</search>")
def no_answer(tools):
    return dataclasses.replace(search_r1(tools), stop_strings=("</search>", "</final>"))
def unmeasured(tools):
    return dataclasses.replace(search_r1(tools), reward_parts=("format", "exact_match", "extra"))

class Sketch(Architecture): pass
class Empty(QwenConfig):
    @classmethod
    def from_dict(cls, fields, *, source=""): return None
class Lost(QwenConfig):
    @classmethod
    def from_dict(cls, fields, *, source=""): return fields["no_such_size"]
"""
FILES = {
    "wrong.py": WRONG,
    "unreadable.py": "def f(x: return\n",
    "lacking.py": "\nimport no_such_package\n",
    "ending.py": "raise SystemExit(1)\n",
    "nest/__init__.py": "",
    "nest/inner.py": "import no_such_package\n",
}


@pytest.fixture
def beside_the_config(tmp_path, monkeypatch):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    before = set(sys.modules)
    # Last, as `python -m` has it: what comes with Python hides a file of the same name.
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in {path.partition("/")[0].removesuffix(".py") for path in FILES}:
            del sys.modules[name]


WRONG_NAMES = {
    "advantage.name": "wrong.branches wrong.on_host wrong.nothing wrong.mean wrong.whole "
    "wrong.raises wrong.ends wrong.later wrong.Kind wrong:mean wrong.brances wrongg.mean "
    "unreadable.f lacking.f ending.f nest.inner.f grop",
    "loss.name": "wrong.bare wrong.scalar wrong.number wrong.counts wrong.loop wrong.in_numpy",
    "loss.term.name": "wrong.bare",
    "loss.token_filter.name": "wrong.bare",
    "filter.trajectories": "wrong.raises void_turn",
    "kl.estimator": "wrong.branching wrong.summed",
    "loss.aggregation": "wrong.halves wrong.no_guard wrong.against wrong.sum_of_none",
    "optimizer.schedule": "wrong.by_branch wrong.endless wrong.grown wrong.ending wrong.sinking",
    "filter.name": "wrong.indices wrong.short wrong.nothing wrong.raises",
    "env.name": "wrong.Comma wrong.Hollow wrong.Failing",
    "env.search.tools": "wrong.Bell,wrong.Bell wrong.Bell,wrong.Twin wrong.Spaced wrong.Deaf "
    "wrong.Late wrong.Broken",
    "reward.weights": "wrong.one wrong.places wrong.each wrong.fails wrong.text",
    "env.search.protocol": "wrong.no_tools wrong.no_protocol wrong.no_tuple wrong.no_answer "
    "wrong.unmeasured",
    "model.architecture": "wrong.Sketch wrong.Empty wrong.Lost",
    "search.engine": "wrong.Finder wrong.Down wrong.Silent",
}
"""Values of keys that name code which cannot be used."""


def begin(config):
    validate(config)
    build(config)


@pytest.mark.parametrize(
    ("key", "name"), [(key, name) for key, names in WRONG_NAMES.items() for name in names.split()]
)
@pytest.mark.usefixtures("beside_the_config")
def test_code_that_cannot_be_used_is_refused_before_the_run(tiny_world, key, name):
    config = debug_tiny.get_config(str(tiny_world))
    config.stages = ("train",)
    config.reward.weights = {"exact_match": 1.0}
    config.kl.coef = 0.1  # without a KL term its estimator is not used
    values = {"env.search.tools": tuple(name.split(",")), "reward.weights": {name: 1.0}}
    config.update_from_flattened_dict({key: values.get(key, name)})
    with pytest.raises(ValueError, match=rf"^config\.{key.partition('.')[0]}\.") as refusal:
        begin(config)
    assert "\n" not in str(refusal.value)


@pytest.mark.usefixtures("beside_the_config")
def test_the_line_that_failed_is_named(tiny_world):
    config = debug_tiny.get_config(str(tiny_world))
    config.advantage.name = "wrong.raises"
    lines = WRONG.splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if text.startswith("def raises("))
    expected = rf"^config\.advantage\.name names 'wrong\.raises'.*no idea \(.*wrong\.py:{line}\)\.$"
    with pytest.raises(ValueError, match=expected):
        begin(config)


@pytest.mark.usefixtures("beside_the_config")
@pytest.mark.parametrize(
    ("loss", "estimator", "key"),
    [("right", "looped", "kl.estimator"), ("loop", "log_ratio", "loss.name")],
)
@pytest.mark.parametrize("term", ["none", "wrong.constant"])  # in which nothing has a gradient
def test_of_several_functions_the_one_without_a_gradient_is_named(
    tiny_world, loss, estimator, term, key
):
    config = debug_tiny.get_config(str(tiny_world))
    config.stages, config.kl.coef, config.loss.term.name = ("train",), 0.1, term
    config.loss.name, config.kl.estimator = f"wrong.{loss}", f"wrong.{estimator}"
    with pytest.raises(ValueError, match="Reverse-mode differentiation") as found:
        begin(config)
    assert str(found.value).startswith(f"config.{key} names ")


@pytest.mark.usefixtures("beside_the_config")
def test_an_environment_that_measures_something_else_once_it_is_made(tiny_world):
    config = debug_tiny.get_config(str(tiny_world))
    config.env.name = "wrong.Turned"
    with pytest.raises(ValueError, match=r"^config.reward.weights names .*wrong.Turned"):
        build(config)


@pytest.mark.usefixtures("beside_the_config")
def test_objectives_that_are_not_used_are_not_traced(tiny_world):
    config = debug_tiny.get_config(str(tiny_world))
    config.stages, config.advantage.name = ("evaluate",), "wrong.raises"
    assert build(config).eval_tasks


OWN = """
from jaxrl.objectives.losses import PolicyLoss

def loss(logprobs, advantages):
    return PolicyLoss(-advantages * logprobs, {})

def gate(loss_mask):
    return loss_mask

def kl(log_ratios):
    return log_ratios**2

def schedule(peak):
    return lambda step: peak
"""


@pytest.mark.parametrize(
    ("key", "name", "shares"),
    [
        ("loss.clip_high", 0.3, True),
        ("loss.name", "parts.loss", False),
        ("loss.term.name", "parts.loss", False),
        ("loss.token_filter.name", "parts.gate", False),
        ("kl.estimator", "parts.kl", False),
        ("optimizer.schedule", "parts.schedule", False),
    ],
)
def test_what_holds_code_of_ones_own_is_traced_anew(key, name, shares, tmp_path, monkeypatch):
    """It, or what it calls, may have been edited and loaded again between two runs of a process."""
    (tmp_path / "parts.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    config = settings(**{"stages": ("train",), "kl.coef": 0.1, "loss.term.coef": 0.1, key: name})
    model = Model(TINY, one_device_mesh(), XLA, num_tokens=NUM_TOKENS, remat="none")
    method = method_of(config)
    first, second = (
        build_stages(resolved(config), model, method)["train"].update for _ in range(2)
    )
    programs = [first.gradient.add.program, second.gradient.add.program]
    assert (programs[0]._jitted is programs[1]._jitted) == shares


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_each_schedule_of_ours_passes(name, warmup):
    changes = {"optimizer.schedule": name, "optimizer.warmup_steps": warmup}
    probe_schedule(build_optimizer_settings(resolved(settings(**changes)), "train"))
    of_sft = settings(**{f"sft.{key}": value for key, value in changes.items()})
    probe_schedule(build_optimizer_settings(resolved(of_sft), "sft"))


@pytest.mark.parametrize("value", [None, float("nan"), "1", 1j])
def test_the_part_of_a_reward_that_is_no_number_is_named(value):
    with pytest.raises(ValueError, match="the reward's 'theirs' is"):
        validate_reward(Reward(parts={"theirs": value}, final_answer="", total=float("nan")))
