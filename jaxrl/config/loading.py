"""Values of keys, from files and the command line: how they are read, and what is refused."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from ml_collections import ConfigDict

from jaxrl.config.schema import KEYS, flat_pairs, missing_folder, unknown_key
from jaxrl.utils.paths import similar_path


def load_values(config: ConfigDict, path: str, *, drops_missing: bool = False) -> None:
    """Sets keys from a YAML or JSON file, nested or with dots.

    Args:
        config: to set them in.
        path: of the file.
        drops_missing: leave keys out whose folder in `extras/` is not there.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not YAML, not a mapping, names a key that does not exist, or holds a value
            that the key does not take.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(
            f"--values={path!r} is not a file; expected YAML or JSON.{similar_path(path)}"
        )
    values = _read_yaml(file)
    if values is None:
        raise ValueError(f"{path} is empty; expected keys and values.")
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}; expected keys and values.")
    pairs = flat_pairs(values)
    flat = dict(pairs)
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{path} sets {key} twice, nested and with dots; leave one out.")
    if drops_missing:
        flat = {key: value for key, value in flat.items() if not missing_folder(key)}
    check_keys(flat, source=f"{path}: ")
    for key, value in flat.items():
        flat[key] = as_default(value, KEYS[key].default)
        try:
            KEYS[key].check(key, flat[key])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    config.update_from_flattened_dict(flat)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, except that a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """See `yaml.constructor.SafeConstructor`."""
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            line = node.start_mark.line + 1
            raise ValueError(f"{repeated[0]!r:.80} is set twice in the mapping of line {line}")
        return dict(super().construct_mapping(node, deep=deep))


def _read_yaml(file: Path) -> Any:
    """Read a YAML or JSON file.

    Raises:
        ValueError: The file is not valid.
    """
    try:
        return yaml.load(file.read_text(encoding="utf-8"), _Loader)
    # PyYAML's constructors raise the last ones, for example for `!!bool zz`.
    except (
        yaml.YAMLError,
        ValueError,
        LookupError,
        AttributeError,
        TypeError,
        RecursionError,
    ) as e:
        raise ValueError(
            f"{file} is not valid YAML or JSON: {' '.join(str(e).split())[:500]}."
        ) from e


SWITCHES = dict.fromkeys(("true", "t", "1", "yes", "y", "on"), True)
SWITCHES |= dict.fromkeys(("false", "f", "0", "no", "n", "off"), False)
"""Words for True and False, in lower case."""


def as_default(value: Any, default: Any) -> Any:
    """A value as the key's default has it, where it stands for one; else the value itself.

    A switch may be `yes` or `off`, a whole number `1e3`; YAML takes a number without a point, such
    as 1e-6, for text.
    """
    if not isinstance(value, str):
        return value
    if default is None or isinstance(default, bool):
        return SWITCHES.get(value.lower(), value)
    if isinstance(default, int | float):
        with contextlib.suppress(ValueError):
            if isinstance(default, float):
                return float(value)
            if not value.isdecimal() and float(value).is_integer():
                return int(float(value))
    return value


def check_keys(keys: Iterable[str], *, source: str = "") -> None:
    """Refuses keys, with their sections and dots, that do not exist.

    Raises:
        ValueError: names the key, and the nearest one that there is.
    """
    for key in keys:
        if problem := unknown_key(key, in_file=bool(source)):
            raise ValueError(f"{source}{problem}")
