import re
from pathlib import Path

import pytest

from configs import ares_looking, debug_tiny, looking, moving, quickstart, seeking
from jaxrl.builders.validation import validate
from jaxrl.config import schema as configuration
from jaxrl.config.keys import (
    DTYPES,
    EVALUATION,
    FREE,
    RESULTS,
    TRAINING,
)
from jaxrl.config.schema import KEYS, default_config

ROOT = Path(configuration.__file__).parents[1]


@pytest.fixture
def config():
    """Return a valid configuration."""
    return debug_tiny.get_config()


def test_shipped_configs_are_valid():
    for module in (debug_tiny, quickstart, looking, ares_looking, moving, seeking):
        validate(module.get_config())
        assert module.get_config("data/other").model.path == "data/other/model"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("model.dtype", "float16", "one of float32, bfloat16"),
        ("search.engine", "none", "an engine such as"),
        ("seed", 2**31, "a number of at least 0 and below 2147483648"),
        ("stages", ("train", "train"), "each at most once, in the order of"),
        ("eval.patience", 2, "0, unless checkpoint.keep_best and eval.every_steps are above 0"),
        ("eval.suites", ("beam",), "a tuple with entries from ('sampled', 'greedy', "),
        ("rollout.temperature", 0.0, "a number of at least 0.001"),
        ("eval.ks", (1, 2), "a tuple of integers from 1 to eval.samples=1"),
        ("advantage.pass_at_k.k_schedule", ((0, 4), (9, 2), (9, 1)), "pairs (step, k) of integers"),
        ("rollout.chunk_tokens", 10**9, "at most rollout.max_total_tokens="),
        ("loss.clip.dual_clip", 0.5, "a number above 1, or 0 for no bound"),
        ("optimizer.num_minibatches", 3, "a divisor of rollout.tasks_per_step=4"),
        ("rollout.max_prompt_tokens", 192, "less than rollout.max_total_tokens=192"),
        ("prompt.template", "Question:", "text that contains {question}"),
        ("prompt.examples", ({"role": "user"},), "messages with 'role' and 'content'"),
        ("model.path", "", "a path"),
        # What ml_collections lets through.
        ("seed", None, "a value of type int, such as 0"),
        ("optimizer.lr", float("nan"), "a finite number"),
        ("reward.weights", {"exact_match": 10**400}, "a finite number for each part"),
        ("ledger.prices", {"search": -1.0}, "a price of at least 0 for each tool"),
        # What no clock could wait for.
        ("search.deadline_s", 1e10, "at most 1e+09 seconds"),
    ],
)
def test_a_value_out_of_range_is_refused(config, key, value, expected):
    config.update_from_flattened_dict({key: value})
    message = f"config.{key} is {value!r}; expected {expected}"
    with pytest.raises(ValueError, match=re.escape(message)):
        validate(config)


@pytest.mark.parametrize("key", ["api_key", "X-Amz-Signature"])
def test_a_key_in_an_address_is_refused_without_being_shown(config, key):
    config.search.engine, config.search.replay = "http", "only"  # whoever asks
    config.search.http.url = f"http://127.0.0.1:8000/retrieve?index=wiki&{key}=abc123"
    message = (
        rf"config\.search\.http\.url contains a parameter '{key}'.*config\.search\.http\.key_env"
    )
    with pytest.raises(ValueError, match=message) as raised:
        validate(config)
    assert "abc123" not in str(raised.value)
    config.search.http.url = "http://127.0.0.1:8000/retrieve?index=wiki&keywords=1&author=me"
    validate(config)


def test_an_engine_without_an_address_is_refused(config):
    config.search.local.corpus = ""
    config.search.engine = "http"
    with pytest.raises(ValueError, match=r"search\.http\.url is ''; expected the URL of a"):
        validate(config)
    config.search.http.url = "http://x"
    validate(config)


def test_keys_of_other_stages_may_be_missing(config):
    config.stages = ("evaluate",)
    config.update_from_flattened_dict({"tasks.train.source": "", "sft.source": ""})
    config.rollout.group_size = 1
    config.update_from_flattened_dict({"search.engine": "empty", "search.local.corpus": ""})
    validate(config)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rollout.group_size = 2.5", "config.rollout.group_size is 2.5; expected a value of type"),
        ("optimizer = 3", "config.optimizer is a section; set its keys, such as optimizer.lr."),
        ("rollout.grup_size = 4", "config.rollout.grup_size; did you mean rollout.group_size?"),
        ("lss.name = 'clip'", "there is no key config.lss; did you mean loss?"),
    ],
)
def test_a_mistake_in_python_is_one_line_with_the_full_key(line, message):
    config = default_config().lock().copy_and_resolve_references()
    with pytest.raises((ValueError, AttributeError), match=re.escape(message)) as raised:
        exec(f"config.{line}", {"config": config})
    # Neither is there another error before it, with the whole configuration in its text.
    assert "\n" not in str(raised.value)
    assert raised.value.__context__ is None or raised.value.__suppress_context__


def test_defaults_are_valid_and_choices_are_explained():
    """A default is one that the key takes, and each choice is explained."""
    for name, key in KEYS.items():
        key.check(name, key.default)
        assert key.meaning.endswith("."), name
        assert key.restart in (FREE, EVALUATION, TRAINING, RESULTS), name
        is_explained = name == "eval.final_suites"  # by eval.suites
        choices = set() if is_explained else {*key.one_of, *key.some_of} - {*DTYPES, ""}
        assert [c for c in choices if not re.search(rf"\b{c}\b", key.meaning)] == [], name


@pytest.mark.parametrize(
    ("name", "changes", "is_written"),
    [
        ("val-core/all/exact_match/mean@1", {}, True),
        ("val-aux/two_hop/f1/sampled", {}, True),
        ("val-core/all/exact_match/maj@4/mean", {"eval.samples": 4}, True),
        ("val-core/all/exact_match/mean@1", {"eval.samples": 4}, False),
        ("val-core/all/exact_match/mean@1", {"eval.samples": 4, "stages": ("evaluate",)}, True),
        ("val-core/all/exact_match/mean@1", {"eval.suites": ("greedy",)}, False),
        ("val-core/openai/gsm8k/exact_match/mean@1", {}, True),
        ("val-core/all/exact_match/empty_search", {}, False),
        ("reward", {}, False),
    ],
)
def test_the_best_metric_is_one_that_is_written(config, name, changes, is_written):
    changes = {"eval.best_metric": name, "checkpoint.keep_best": 1, **changes}
    config.update_from_flattened_dict(changes)
    if is_written:
        validate(config)
    else:
        with pytest.raises(ValueError, match=r"config\.eval\.best_metric is "):
            validate(config)
