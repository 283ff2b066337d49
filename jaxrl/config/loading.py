"""Values of keys, from files and the command line: how they are read, and what is refused."""

from __future__ import annotations

import contextlib
import itertools
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


MOST_BYTES = 4 * 2**20
"""Size of the largest file of values that is read."""

MOST_VALUES = 100_000
"""Most values of a file, each counted where it stands and wherever an alias repeats it."""


class _Loader(yaml.SafeLoader):
    """PyYAML's own, which stops at `MOST_VALUES`: a million take it a minute."""

    num_nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """See `yaml.composer.Composer`."""
        self.num_nodes += 1
        if self.num_nodes > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES:,} values")
        return super().compose_node(parent, index)


def _read_yaml(file: Path) -> Any:
    """Reads a YAML or JSON file.

    Raises:
        ValueError: it cannot be read, is too large, or aliases make it endless.
    """
    if (size := file.stat().st_size) > MOST_BYTES:
        raise ValueError(f"{file} has {size:,} bytes; expected at most {MOST_BYTES:,}.")
    try:
        loader = _Loader(file.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is None:
            return None
        if _num_values(node, {}) > MOST_VALUES:
            raise ValueError(f"its aliases make more than {MOST_VALUES:,} values of it")
        return loader.construct_document(node)
    except RecursionError:
        raise ValueError(f"{file} is nested too deeply to be read; flatten it.") from None
    # The last ones are what PyYAML's own constructors run into, as of `!!bool zz`.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{file} is not valid YAML or JSON: {' '.join(str(error).split())[:500]}."
        ) from error


def _num_values(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """Values of a node with all that aliases repeat in it.

    Raises:
        ValueError: it holds itself, or a key twice, of which the last would win.
    """
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if known.get(node) == 0:  # begun, and met again
        raise ValueError(f"what begins in line {node.start_mark.line + 1} holds itself")
    if node not in known:
        known[node] = 0
        inner = node.value
        if isinstance(node, yaml.MappingNode):
            _refuse_second_keys([key for key, _ in node.value])
            inner = itertools.chain(*node.value)
        known[node] = 1 + sum(_num_values(one, known) for one in inner)
    return known[node]


def _refuse_second_keys(keys: Iterable[yaml.Node]) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key in keys:
        name, line = (key.tag, str(key.value)), key.start_mark.line + 1
        if isinstance(key, yaml.ScalarNode) and name in lines:
            raise ValueError(f"{key.value!r:.80} stands in line {lines[name]} and in line {line}")
        lines[name] = line


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
