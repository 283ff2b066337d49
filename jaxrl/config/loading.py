"""Load configuration values from Python, YAML and JSON files and the command line."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ml_collections import ConfigDict

from jaxrl.config.schema import (
    KEYS,
    convert_lists_to_tuples,
    explain_unknown_key,
    find_missing_extra,
    flatten_config,
)
from jaxrl.utils.callables import format_failure
from jaxrl.utils.paths import suggest_path


def load_config_file(argument: str) -> ConfigDict:
    """Call `get_config` of a Python file and return the resulting locked configuration.

    Args:
        argument: Path of the file, optionally followed by a colon and an argument for `get_config`.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not valid Python or raises an exception, or the result is not a
            `ConfigDict`.
    """
    path, _, config_argument = argument.partition(":")
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"--config={path} is not a file; expected one such as configs/quickstart.py."
            f"{suggest_path(path)}"
        )
    spec = importlib.util.spec_from_file_location("config_file", path)
    if spec is None or spec.loader is None:
        raise ValueError(
            f"--config={path} takes a Python file, such as configs/quickstart.py; pass YAML or "
            f"JSON with --values={path}."
        )
    Path(path).open().close()  # raises a clearer OSError than the import would
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config(*([config_argument] if config_argument else []))
    except (Exception, SystemExit) as error:  # the file runs user code
        raise ValueError(f"--config={path}: {format_failure(error)}.") from error
    if not isinstance(config, ConfigDict):
        raise ValueError(
            f"--config={path}: get_config returned a {type(config).__name__}; expected "
            "jaxrl.config.default_config() with changes."
        )
    return config.lock()


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse `--config.key=value`, `--config.switch` and `--noconfig.switch` arguments.

    Raises:
        ValueError: An argument has a different form, or its key or value is invalid.
    """
    keys: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        prefix, _, key = name.partition("config.")
        if not key or prefix.strip("-") not in ("", "no") or not prefix.startswith("-"):
            raise ValueError(f"unexpected argument {argument}; expected --config.key=value.")
        check_keys([key])
        default = KEYS[key].default
        value: Any = coerce_to_default_type(text, default)
        if not equals and isinstance(default, bool):
            value = prefix.strip("-") != "no"
        elif not equals:
            raise ValueError(f"{argument}: expected --config.key=value.")
        elif isinstance(default, tuple | dict):
            try:
                value = convert_lists_to_tuples(ast.literal_eval(text))
            except (ValueError, SyntaxError) as error:
                kind = type(default).__name__
                raise ValueError(f"{argument}: expected a Python {kind}.") from error
        KEYS[key].check(key, value)
        keys[key] = value
    return keys


def load_values(config: ConfigDict, path: str, *, skip_missing: bool = False) -> None:
    """Set config keys from a YAML or JSON file, whose keys may be nested or dotted.

    Args:
        config: Configuration to change in place.
        path: Path of the file.
        skip_missing: True to skip keys of extras whose folders are missing.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not a YAML mapping, or a key or value is invalid.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(
            f"--values={path!r} is not a file; expected YAML or JSON.{suggest_path(path)}"
        )
    values = _read_yaml(file)
    if not isinstance(values, dict):
        raise ValueError(f"{path} contains a {type(values).__name__}; expected keys and values.")
    try:
        flat = flatten_config(values)
        if skip_missing:
            flat = {key: value for key, value in flat.items() if not find_missing_extra(key)}
        flat = parse_values(flat)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    config.update_from_flattened_dict(flat)


def _read_yaml(file: Path) -> Any:
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    # PyYAML's constructors raise many exception types, such as a KeyError for `!!bool zz`.
    except Exception as error:
        text = " ".join(str(error).split())[:500]
        raise ValueError(f"{file} is not valid YAML or JSON: {text}.") from error


BOOL_WORDS = dict.fromkeys(("true", "t", "1", "yes", "y", "on"), True)
BOOL_WORDS |= dict.fromkeys(("false", "f", "0", "no", "n", "off"), False)
"""Boolean values by lower-case word."""


def coerce_to_default_type(value: Any, default: Any) -> Any:
    """Convert a string to the type of the default; return it unchanged if that fails.

    Accepts `yes` or `off` for a bool and `1e3` for an integer. YAML also needs this conversion: it
    parses a number without a decimal point, such as 1e-6, as a string.
    """
    if not isinstance(value, str):
        return value
    if default is None or isinstance(default, bool):
        return BOOL_WORDS.get(value.lower(), value)
    if isinstance(default, int | float):
        with contextlib.suppress(ValueError):
            if isinstance(default, float):
                return float(value)
            if float(value).is_integer():
                return int(value) if value.isdecimal() else int(float(value))
    return value


def parse_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values to the types of their keys' defaults, and validate them.

    Raises:
        ValueError: A key is unknown, or its value is invalid.
    """
    check_keys(values)
    parsed = {}
    for key, value in values.items():
        parsed[key] = coerce_to_default_type(value, KEYS[key].default)
        KEYS[key].check(key, parsed[key])
    return parsed


def check_keys(keys: Iterable[str]) -> None:
    """Raise a ValueError if a dotted key is unknown. The message suggests a similar key."""
    for key in keys:
        if problem := explain_unknown_key(key):
            raise ValueError(problem)
