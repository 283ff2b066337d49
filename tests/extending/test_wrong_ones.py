"""Wrong code of a user's own: refused before the run begins, in one line that names the key."""

import sys

import jax
import numpy as np
import optax
import pytest

from configs import debug_tiny
from jaxrl.builders.components import assemble, make_stages
from jaxrl.builders.method import batch_shape, method_of, optimizer_of
from jaxrl.builders.validation import validate
from jaxrl.envs.base import Reward
from jaxrl.models.attention.reference import XLA
from jaxrl.models.policy import Model
from jaxrl.objectives.advantages import COLUMNS, ESTIMATORS
from jaxrl.objectives.aggregation import AGGREGATIONS
from jaxrl.objectives.filters import FILTERS
from jaxrl.objectives.losses import LOSSES
from jaxrl.sampling.step_results import checked_reward
from jaxrl.training.collect import check_filter
from jaxrl.training.minibatches import check_aggregation
from jaxrl.training.optimizer import SCHEDULES, check_schedule
from jaxrl.training.policy_loss import check_update, make_policy_loss
from jaxrl.training.update import UpdateStep
from tests.helpers import NUM_TOKENS, TINY, estimator, method_with, settings
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
def pair(rewards): return rewards, rewards
def raises(rewards): raise RuntimeError("no idea\\nmore lines")
def ends(rewards): raise SystemExit(3)
async def later(rewards): return rewards
def yields(rewards): yield rewards
class Kind: pass
thing = Kind()

def bare(logprobs): return logprobs
def scalar(logprobs): return PolicyLoss(logprobs.mean(), {})
def number(logprobs): return PolicyLoss(logprobs, {"x": 1.0})
def listed(logprobs): return PolicyLoss(logprobs, [logprobs])
def named(logprobs): return PolicyLoss(logprobs, {"entropy": logprobs})
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
def rate(peak): return peak
def ending(peak): return lambda step: jnp.where(step < 3, peak, jnp.nan)
def sinking(peak): return lambda step: peak * (1.5 - step)

def indices(rewards): return np.arange(len(rewards))
def short(rewards): return np.ones(3, bool)

def one(text): return 1.0
def places(response, answers, /): return 1.0
def each(turns, answers): yield 1.0

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
bell = Bell()

class Finder(SearchEngine):
    name = "find"
    def run(self, call): return ""
class Down(SearchEngine):
    def __init__(self): raise OSError("down")
    def run(self, call): return ""
class Strange(SearchEngine):
    def __new__(cls): return 3
    def run(self, call): return ""

class Game(Env):
    stop_strings, reward_parts = ("</a>",), ("exact_match",)
    def start(self, tasks): return []
    def step(self, episodes, texts): return []
    def score(self, group): return []
class Comma(Game): stop_strings = ("</a>")
class Parts(Game): reward_parts = ["exact_match"]
class Hollow(Env):
    stop_strings, reward_parts = ("</a>",), ("exact_match",)
class Lazy(Game):
    async def step(self, episodes, texts): return []
class Narrow(Game):
    def score(self): return []
class Failing(Game):
    def __init__(self): raise ValueError("no game")
class Nobody(Game):
    def __new__(cls): return None
class Turned(Game):
    def __init__(self): self.reward_parts = ("f1",)
game = Game()

def no_tools(): return search_r1()
def no_protocol(tools): return "search_r1"
def no_tuple(tools): return dataclasses.replace(search_r1(tools), stop_strings="</search>")
def no_answer(tools):
    return dataclasses.replace(search_r1(tools), stop_strings=("</search>", "</final>"))
def unmeasured(tools):
    return dataclasses.replace(search_r1(tools), reward_parts=("format", "exact_match", "extra"))
protocol = search_r1()

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
    "relative.py": "from . import wrong\n",
    "lacking.py": "\nimport no_such_package\n",
    "at_fault.py": "import math\nX = math.no_such\n",
    "ending.py": "raise SystemExit(1)\n",
    "code.py": "def f(rewards): return rewards\n",
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


ESTIMATES = [
    ("wrong.branches", r"JAX cannot trace: TracerBoolConversionError: .*wrong\.py:13\)\.$"),
    ("wrong.on_host", r"JAX cannot trace: TracerArrayConversionError: .*wrong\.py:14\)\.$"),
    ("wrong.nothing", r"returned NoneType; expected float32 \[16\], one number a trajectory"),
    ("wrong.mean", r"returned float32 \[\]; expected float32 \[16\]"),
    ("wrong.whole", r"returned int32 \[16\]; expected float32"),
    ("wrong.pair", "returned tuple; expected float32"),
    ("wrong.raises", r"RuntimeError: no idea \(.*wrong\.py:19\)\.$"),
    ("wrong.ends", r"SystemExit: 3 \(.*wrong\.py:20\)\.$"),
    ("wrong.later", "an async function; expected one that returns"),
    ("wrong.yields", "a generator; expected one that returns"),
    ("wrong.Kind", "expected a function whose arrays are parameters by name"),
    ("wrong.thing", "a Kind; expected a function"),
    ("wrong:mean", r"returned float32 \[\]"),
    ("wrong.brances", r"wrong\.py does not define 'brances' \(did you mean 'branches'\?\)"),
    ("wrongg.mean", r"no module 'wrongg' is on sys.path \(did you mean 'wrong'\?\); put its file"),
    ("unreadable.f", r"SyntaxError: .*unreadable\.py, line 1"),
    ("relative.f", r"ImportError: attempted relative import .*relative\.py:1\)"),
    ("lacking.f", r"No module named 'no_such_package' \(.*lacking\.py:2\)"),
    ("at_fault.f", r"AttributeError: .* 'no_such' \(.*at_fault\.py:2\)"),
    ("ending.f", r"SystemExit: 1 \(.*ending\.py:1\)"),
    ("nest.inner.f", r"No module named 'no_such_package' \(.*inner\.py:1\)"),
    ("nest.outer.f", r"__init__\.py does not define 'outer\.f'"),
    ("code.f", r"/lib/.*code\.py does not define 'f'"),
    ("grop", r"is 'grop' \(did you mean 'grpo'\?\); expected one of"),
]
LOSS = [
    ("wrong.bare", "returned an array; expected a PolicyLoss"),
    ("wrong.scalar", r"loss is of the shape \[\]; expected an array \[1, 768\]"),
    ("wrong.number", "x is float; expected an array"),
    ("wrong.listed", "metrics are list; expected a mapping"),
    ("wrong.named", "metrics hold 'entropy'; expected texts other than entropy, pg_loss"),
    ("wrong.counts", "loss is int32; expected float32"),
    ("wrong.loop", "JAX cannot differentiate: ValueError: Reverse-mode differentiation"),
    ("wrong.in_numpy", r"JAX cannot trace: TracerArray.*wrong\.py:\d+\)"),
]
TERM = [
    (
        "wrong.bare",
        r"^config\.loss\.term\.name names 'wrong.bare', which returned an array; expected",
    ),
    ("wrong.loop", "JAX cannot differentiate: ValueError: Reverse-mode differentiation"),
]
GATE = [
    (
        "wrong.bare",
        r"which returned .*float32\[1,768\].*; expected bool \[1, 768\], one a token",
    ),
    ("wrong.in_numpy", r"JAX cannot trace: TracerArray.*wrong\.py:\d+\)"),
]
TRAJECTORIES = [
    ("wrong.raises", "asks for 'rewards'; expected some of trajectory"),
    ("void_turn", r"is 'void_turn' \(did you mean 'void_turns'\?\); expected one of"),
]
KL = [
    ("wrong.branching", r"JAX cannot trace: TracerBool.*wrong\.py:\d+\)"),
    ("wrong.summed", r"returned the shape \[\]; expected \[1, 768\]"),
]
WEIGHTS = [
    ("wrong.halves", r"returned \[2\] with 2 weights; expected finite \[16\] from 0"),
    ("wrong.no_guard", r"returned \[16\] with 15 weights"),
    ("wrong.against", r"returned \[\] with 0 weights; expected finite"),
    ("wrong.sum_of_none", r"failed: ZeroDivisionError: no tokens \(.*wrong\.py:\d+\)"),
]
SCHEDULE = [
    ("wrong.by_branch", r"failed: TracerBoolConversionError: .*wrong\.py:\d+\)"),
    ("wrong.endless", r"failed: ZeroDivisionError: .*wrong\.py:\d+\)"),
    ("wrong.grown", r"gave \[.*\] at step 0 of 4; expected a finite number"),
    ("wrong.ending", r"gave nan at step 3 of 4; expected a finite number of at least 0"),
    ("wrong.sinking", r"gave -.* at step 2 of 4; expected a finite number of at least 0"),
    ("wrong.rate", "failed: TypeError: 'float' object is not callable"),
]
FILTER = [
    ("wrong.indices", r"returned int64 \[16\]; expected bool \[16\]"),
    ("wrong.short", r"returned bool \[3\]; expected bool \[16\]"),
    ("wrong.nothing", r"returned object \[\]; expected bool"),
    ("wrong.raises", r"failed: RuntimeError: no idea \(.*wrong\.py:19\)"),
    ("wrong.ends", "failed: SystemExit: 3"),
]
ENV = [
    ("wrong.Comma", r"stop_strings is '</a>'; expected a tuple: \('</a>',\), with a comma"),
    ("wrong.Parts", r"reward_parts is \['exact_match'\]; expected a tuple of texts"),
    ("wrong.Hollow", "a class without start, step, score; expected"),
    ("wrong.Lazy", r"Lazy\.step', an async function"),
    ("wrong.Narrow", r"Narrow\.score': too many positional .*; expected a function of \(group\)"),
    ("wrong.Failing", r"Failing could not be made: ValueError: no game \(.*wrong\.py:"),
    ("wrong.Nobody", "Nobody made a NoneType"),
    ("wrong.game", "a Game; expected a class with stop_strings"),
]
TOOLS = [
    (("wrong.Bell", "wrong.Bell"), "names 'wrong.Bell' twice; expected each tool once"),
    (("wrong.Bell", "wrong.Twin"), "a tool is called 'bell'; expected a name"),
    (("wrong.Spaced",), "a tool is called 'a bell'; expected a name that can be a tag"),
    ((3,), "holds 3; expected a name, as 'my_tool.Calculator'"),
    (("wrong.Deaf",), r"Deaf\.run': too many positional .*; expected a function of \(self, call\)"),
    (("wrong.Late",), r"Late\.run', an async function"),
    (("wrong.Broken",), r"Broken could not be made: OSError: no bell \(.*wrong\.py:"),
    (("wrong.bell",), "names 'wrong.bell'; expected a class of"),
]
REWARDS = [
    (
        {"wrong.one": 1.0},
        r"of \(text\); expected a function f\(response, .* verl calls it",
    ),
    ({"wrong.places": 1.0}, r"a function of \(response, answers, /\); expected a function f\("),
    ({"wrong.each": 1.0}, r"a generator of \(turns, answers\); expected a function f\("),
    ({"wrong.Kind": 1.0}, "a class; expected a function"),
    ({"wrong.thing": 1.0}, "a Kind; expected a function"),
]
PROTOCOLS = [
    ("wrong.no_tools", r"too many positional .*; expected a function of \(tools\)"),
    ("wrong.no_protocol", r"returned str; expected a jaxrl\.envs\.protocol\.Protocol"),
    ("wrong.no_tuple", r"stop_strings is '</search>'; expected a tuple: \('</search>',\)"),
    ("wrong.protocol", "a Protocol; expected a function"),
    ("wrong.no_answer", r"stop_strings lack '</answer>'"),
    ("wrong.unmeasured", "reward part 'extra'; expected some of format, answer, exact_match, f1"),
]
ARCHITECTURES = [
    ("jaxrl.models.architecture.Architecture", "does not define abstract_params, decode_weights, "),
    ("wrong.Sketch", "does not define abstract_params, decode_weights, "),
    ("wrong.Empty", "from_dict returned NoneType"),
    ("wrong.Lost", r"KeyError: 'no_such_size' \(.*wrong\.py:"),
]
ENGINES = [
    ("wrong.Finder", "a tool called 'find'; expected one called 'search'"),
    ("wrong.Down", r"Down could not be made: OSError: down \(.*wrong\.py:"),
    ("wrong.Strange", "Strange made a int"),
]
CASES = {
    "advantage.name": ESTIMATES,
    "loss.name": LOSS,
    "loss.term.name": TERM,
    "loss.gate.name": GATE,
    "filter.trajectories": TRAJECTORIES,
    "kl.estimator": KL,
    "loss.aggregation": WEIGHTS,
    "optimizer.schedule": SCHEDULE,
    "filter.name": FILTER,
    "env.name": ENV,
    "env.search.tools": TOOLS,
    "reward.weights": REWARDS,
    "env.search.protocol": PROTOCOLS,
    "model.architecture": ARCHITECTURES,
    "search.engine": ENGINES,
}


def begin(config):
    validate(config)
    assemble(config)


@pytest.mark.parametrize(
    ("key", "value", "message"), [(key, *case) for key, cases in CASES.items() for case in cases]
)
@pytest.mark.usefixtures("beside_the_config")
def test_what_cannot_work_is_refused_before_the_run(tiny_world, key, value, message):
    config = debug_tiny.get_config(str(tiny_world))
    config.stages = ("train",)
    config.reward.weights = {"exact_match": 1.0}
    config.kl.coef = 0.1  # without a term its estimator is not traced
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ValueError, match=message) as refusal:
        begin(config)
    text = str(refusal.value)
    assert text.startswith(f"config.{key.partition('.')[0]}.")
    assert "\n" not in text


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
    with pytest.raises(ValueError, match="cannot differentiate: ValueError: Reverse-mode") as found:
        begin(config)
    assert str(found.value).startswith(f"config.{key} names ")


@pytest.mark.usefixtures("beside_the_config")
def test_an_environment_that_measures_something_else_once_it_is_made(tiny_world):
    config = debug_tiny.get_config(str(tiny_world))
    config.env.name = "wrong.Turned"
    with pytest.raises(
        ValueError, match=r"^config.reward.weights names 'exact_match', which 'wron"
    ):
        assemble(config)


@pytest.mark.usefixtures("beside_the_config")
def test_objectives_that_are_not_used_are_not_traced(tiny_world):
    config = debug_tiny.get_config(str(tiny_world))
    config.stages, config.advantage.name = ("evaluate",), "wrong.raises"
    assert assemble(config).eval_tasks


@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_estimator_of_ours_passes(name):
    method = method_with(**{"advantage.name": name})
    estimator(**{"advantage.name": name}).check(method.tasks_per_step * method.group_size)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("level", ["none", "token", "sequence"])
@pytest.mark.parametrize("place", ["loss", "reward"])
def test_each_loss_of_ours_passes(name, level, place):
    changes = {"loss.correction.level": level, "kl.place": place, "kl.coef": 0.1}
    config = settings(**{"loss.name": name, "loss.entropy_coef": 0.1, **changes})
    method = method_of(config)
    model = Model(TINY, one_device_mesh(), XLA, num_tokens=NUM_TOKENS, remat="none")
    update = UpdateStep(model, make_policy_loss(method), optax.identity(), entropy_gradient=True)
    check_update(update, batch_shape(config, "train"), method)


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
        ("loss.gate.name", "parts.gate", False),
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
    first, second = (make_stages(config, model, method)["train"].update for _ in range(2))
    programs = [first.gradient.add.program, second.gradient.add.program]
    assert (programs[0]._jitted is programs[1]._jitted) == shares


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_each_schedule_of_ours_passes(name, warmup):
    changes = {"optimizer.schedule": name, "optimizer.warmup_steps": warmup}
    check_schedule(optimizer_of(settings(**changes), "train"))
    of_sft = settings(**{f"sft.{key}": value for key, value in changes.items()})
    check_schedule(optimizer_of(of_sft, "sft"))


def test_an_aggregation_is_tried_on_counts_that_a_mini_batch_may_have(monkeypatch):
    seen = []

    def weigh(token_counts):
        seen.append(token_counts)
        return 1.0 / token_counts.clip(1)

    monkeypatch.setitem(AGGREGATIONS, "token-mean", weigh)
    sizes = {"rollout.tasks_per_step": 1024, "rollout.group_size": 8}
    method = method_with(**sizes, **{"optimizer.num_minibatches": 8})
    check_aggregation(method, max_response_tokens=100)
    assert [len(counts) for counts in seen] == [1024, 1]
    assert (min(seen[0]), max(seen[0])) == (0, 100)


@pytest.mark.parametrize("name", ["none", *FILTERS])
@pytest.mark.parametrize("metric", ["acc", "score", "seq_reward", "seq_final_reward"])
def test_each_filter_of_ours_passes(name, metric):
    check_filter(method_with(**{"filter.name": name, "filter.varied.metric": metric}))


def test_what_is_traced_is_what_a_step_has(monkeypatch):
    seen = {}

    def estimate(
        rewards, is_correct, group_ids, token_counts, mean_entropies, is_abstention,
        is_well_formed, key,
    ):  # fmt: skip
        seen.update({name: array.dtype for name, array in locals().items() if name != "seen"})
        return rewards

    monkeypatch.setitem(ESTIMATORS, "rloo", estimate)
    estimator(**{"advantage.name": "rloo"}).check(16)
    assert set(COLUMNS) == set(seen)
    assert seen["rewards"] == seen["mean_entropies"] == np.float32
    assert seen["group_ids"] == seen["token_counts"] == np.int32
    assert seen["is_correct"] == seen["is_abstention"] == seen["is_well_formed"] == np.bool_
    assert jax.dtypes.issubdtype(seen["key"], jax.dtypes.prng_key)


@pytest.mark.parametrize("value", [None, float("nan"), "1", 1j])
def test_the_part_of_a_reward_that_is_no_number_is_named(value):
    with pytest.raises(ValueError, match="the reward's 'theirs' is"):
        checked_reward(Reward(parts={"theirs": value}, final_answer="", total=float("nan")))
