"""Values from Python, YAML and JSON files and from the command line, and what is refused."""

import json
import re

import pytest

from configs import debug_tiny
from jaxrl.builders.validation import validate
from jaxrl.config.loading import load_config_file, load_values, parse_overrides
from jaxrl.config.schema import default_config, flatten_config, read_flat_config, serialize_config
from tests.helpers import as_nobody, without_keys_of


@pytest.fixture
def config():
    """Return a valid configuration."""
    return debug_tiny.get_config()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        # A whole number for a float, and an exponent without a point.
        (
            "my.yaml",
            "rollout: {group_size: 3}\noptimizer: {lr: 1e-6, grad_clip: 2}\nstages: [train]",
        ),
        (
            "my.json",
            '{"rollout.group_size": 3, "optimizer": {"lr": 1e-6, "grad_clip": 2}, '
            '"stages": ["train"]}',
        ),
    ],
)
def test_nested_and_dotted_values_are_loaded(config, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    load_values(config, str(tmp_path / name))
    assert config.rollout.group_size == 3
    assert (config.optimizer.lr, config.optimizer.grad_clip) == (1e-6, 2.0)
    assert config.stages == ("train",)
    validate(config)


def test_a_mapping_of_free_names_is_one_value(config, tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("prompt: {chat_template_kwargs: {enable_thinking: false}}")
    load_values(config, str(file))
    assert config.prompt.chat_template_kwargs == {"enable_thinking": False}
    validate(config)
    config.prompt.chat_template_kwargs["depth"] = 2
    assert flatten_config(config)["prompt.chat_template_kwargs"] == {
        "enable_thinking": False,
        "depth": 2,
    }
    assert default_config().prompt.chat_template_kwargs == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout: {group_size: many}", "rollout.group_size is 'many'; expected a value of type"),
        ("model.remat: off", "model.remat is False; expected a value of type str, such as 'full'"),
        ("rollout: 3", "config.rollout is a section; set its keys"),
        ("lr: 1.0", "no key config.lr; did you mean optimizer.lr or sft.optimizer.lr?"),
        ("- 1", "contains a list; expected keys and values"),
        ("rollout: {max_turns: 1}\nrollout.max_turns: 2", "rollout.max_turns is set twice"),
        ("seed: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("{a: " * 100_000, "is not valid YAML or JSON"),
    ],
)
def test_a_bad_values_file_is_refused_in_one_line_and_changes_nothing(
    config, tmp_path, text, message
):
    file = tmp_path / "my.yaml"
    file.write_text(text)
    before = flatten_config(config)
    with pytest.raises(
        ValueError, match=rf"^{re.escape(str(file))}.*{re.escape(message)}"
    ) as raised:
        load_values(config, str(file))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 2_000
    assert flatten_config(config) == before


def test_json_round_trip(config, tmp_path):
    config.prompt.examples = ({"role": "user", "content": "Où ?"},)
    config.optimizer.lr = 1e-7
    config.advantage.pass_at_k.k_schedule = ((0, 4), (60, 1))
    config.prompt.chat_template_kwargs = {"enable_thinking": False}
    config.model.eos_tokens = ("<|im_end|>",)
    file = tmp_path / "config.json"
    file.write_text(serialize_config(config), encoding="utf-8")
    other = default_config().lock()
    load_values(other, str(file))
    assert other == config
    assert read_flat_config(file) == flatten_config(config)
    assert serialize_config(other) == serialize_config(config)


@without_keys_of("lora")
def test_keys_of_a_folder_that_is_not_there_name_it(tmp_path):
    config, file = default_config(), tmp_path / "config.json"
    file.write_text(json.dumps({"seed": 7, "model": {"lora": {"rank": 0, "targets": ["q"]}}}))
    named = r"config\.model\.lora\.rank is a key of jaxrl/extras/lora, and that folder is missing"
    with pytest.raises(ValueError, match=named):
        load_values(config, str(file))
    load_values(config, str(file), skip_missing=True)  # as a run's own are read
    assert (config.seed, "lora" in config.model) == (7, False)


def test_arguments_are_parsed_by_the_type_of_their_key():
    arguments = [
        "--config.num_steps=1e3",
        "-config.seed=7",
        "--config.optimizer.lr=1",
        "--config.prompt.template=1e3 {question}",
        "--config.rollout.deterministic=no",
        "--config.model.replay",
        "--noconfig.model.scan_layers",
        "--config.stages=('train',)",
        "--config.advantage.pass_at_k.k_schedule=[[0, 4]]",
        "--config.ledger.prices={'search': 0.5}",
    ]
    assert parse_overrides(arguments) == {
        "num_steps": 1000,
        "seed": 7,
        "optimizer.lr": 1.0,
        "prompt.template": "1e3 {question}",
        "rollout.deterministic": False,
        "model.replay": True,
        "model.scan_layers": False,
        "stages": ("train",),
        "advantage.pass_at_k.k_schedule": ((0, 4),),
        "ledger.prices": {"search": 0.5},
    }


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("seed=1", "unexpected argument seed=1; expected --config.key=value."),
        ("--config.seed=many", "config.seed is 'many'; expected a value of type int"),
        ("--config.rollout.deterministic=maybe", "expected True, False or None"),
        ("--config.stages=train", "expected a Python tuple"),
        ("--config.ledger.prices.search=1", "did you mean ledger.prices?"),
        ("--noconfig.model.remt", "there is no key config.model.remt; did you mean model.remat?"),
    ],
)
def test_bad_arguments_are_refused(argument, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_overrides([argument])


HEAD = """from jaxrl.config import default_config
def get_config(seed="0"):
    config = default_config().lock()
    config.seed = int(seed)
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{HEAD}    config.rollout.grup_size = 4", "mean rollout.group_size? ({file}:5)."),
        (f"{HEAD}    config.seed = sed", "NameError: name 'sed' is not defined ({file}:5)."),
        ("def get_config():\n    return {{}}", "get_config returned a dict; expected jaxrl.con"),
        ("def get_config(_):\n    raise SystemExit(3)", "SystemExit: 3 ({file}:2)."),
    ],
)
def test_a_mistake_in_a_config_file_is_named_with_its_line(tmp_path, text, message):
    file = tmp_path / "bad.py"
    file.write_text(text.replace("{{}}", "{}"))
    with pytest.raises(ValueError, match=rf"^--config={file}: ") as raised:
        load_config_file(f"{file}:7" if "get_config()" not in text else str(file))
    assert message.format(file=file) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_config_files_by_name(open_folder):
    file = open_folder / "mine.py"
    file.write_text(f"{HEAD}    return config\n")
    assert load_config_file(str(file)).seed == 0
    config = load_config_file(f"{file}:7")
    assert (config.seed, config.is_locked) == (7, True)
    (open_folder / "my.yaml").touch()
    with pytest.raises(ValueError, match=r"takes a Python file, .* with --values=.*/my\.yaml\."):
        load_config_file(str(open_folder / "my.yaml"))
    with pytest.raises(FileNotFoundError, match=rf"is not a file; .* Did you mean '{file}'"):
        load_config_file(str(open_folder / "mine"))
    file.chmod(0)
    with as_nobody(), pytest.raises(PermissionError, match="Permission denied"):
        load_config_file(str(file))
