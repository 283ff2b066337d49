"""Types for configuration keys and rules, and a loader for the keys that extras define.

`schema.py` defines the keys of the core. An extra defines its keys in `extras/*/keys.py`, which
must not import the rest of the extra.
"""

from __future__ import annotations

import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from ml_collections import ConfigDict

from jaxrl.utils.concurrency import MAX_TIMEOUT_S

FREE = "free"
"""A restart may change the key. Results stay the same up to rounding."""
EVALUATION = "evaluation"
"""A restart may change the key unless evaluations steer training. The key affects nothing else."""
TRAINING = "training"
"""Changing the key starts a different experiment, unless the restart only evaluates."""
RESULTS = "results"
"""Changing the key starts a different experiment."""

MODEL = "a model"
"""Value of `Key.holds` for the path of a model folder."""
CORPUS = "a corpus"
"""Value of `Key.holds` for a corpus, whose content hash is stored with its index."""

FILE = "a file"
"""Value of `Key.holds` for any other file."""

DTYPES = ("float32", "bfloat16")
REPLAY = ("off", "record", "only")


@dataclass(frozen=True)
class Key:
    """Configuration key with constraints on its value. See `Rule` for cross-key rules."""

    default: Any  # None: a switch whose default depends on the platform
    meaning: str  # Markdown, with the unit
    _: KW_ONLY
    restart: str = ""  # effect of a change in a resumed run; "" for the default of the section
    above: float | None = None  # this field and the next three are bounds of a number
    at_least: float | None = None
    at_most: float | None = None
    below: float | None = None
    one_of: tuple[Any, ...] = ()  # allowed values; () for any, and for names in a registry
    some_of: tuple[str, ...] = ()  # allowed entries of a tuple
    is_valid: Callable[[Any], bool] | None = None  # additional check
    expected: str = ""  # expected value, for error messages; "": derived from the fields above
    example: Any = None  # example item of a mapping with user-defined names, for error messages
    is_nested: bool = False  # True if items of such a mapping may be lists and mappings
    group: str = ""  # entry-point group whose names are valid values
    names_code: bool = False  # True if the value may be the dotted path of a user's function
    required: str = ""  # expected value; "" if the key may be empty in a run that reads its section
    holds: str = ""  # `MODEL`, `CORPUS` or `FILE` for a path, whose content is compared on resume
    file: str = ""  # file in the folder that the key names, whose content is compared too
    written_to: str = ""  # export folder in the workdir; the value must be another folder
    # Returns True if checkpoints depend on the value, so that a resumed run must not change it.
    is_fixed: Callable[[ConfigDict], Any] | None = None

    def check(self, name: str, value: Any) -> None:
        """Validate a value of the key: type, range and allowed values.

        ml_collections is too permissive: it accepts None for any type and a bool for a number.

        Raises:
            ValueError: The value is invalid. The message names the key and the expected value.
        """
        is_number = isinstance(self.default, int | float) and not isinstance(self.default, bool)
        if isinstance(self.default, float):
            if not is_finite(value):
                reject_value(name, value, f"a finite number, such as {self.default!r}")
        elif self.default is None:
            if value is not None and not isinstance(value, bool):
                reject_value(name, value, "True, False or None")
        elif type(value) is not type(self.default):
            expected = f"a value of type {type(self.default).__name__}, such as {self.default!r}"
            reject_value(name, value, expected)
        if self.one_of and value not in self.one_of:
            choices = ", ".join(str(choice) or repr(choice) for choice in self.one_of)
            reject_value(name, value, self.expected or f"one of {choices}")
        if self.some_of and not all(choice in self.some_of for choice in value):
            reject_value(name, value, f"a tuple with entries from {self.some_of}")
        if is_number and not self._is_in_range(value):
            reject_value(name, value, self.expected or f"a number {self._format_range()}")
        if name.endswith("_s") and is_number and value > MAX_TIMEOUT_S:
            reject_value(name, value, f"at most {MAX_TIMEOUT_S:g} seconds (31 years)")
        if isinstance(self.default, dict):
            kinds = "values that are true, false, a number or a string"
            kinds += ", or lists of these" * self.is_nested
            for inner, item in value.items():
                if not isinstance(inner, str) or not _is_json(item, is_flat=not self.is_nested):
                    reject_value(
                        name, value, f"names with {kinds}, such as {{'name': {self.example!r}}}"
                    )
        if self.is_valid is not None and not self.is_valid(value):
            reject_value(name, value, self.expected)
        if name.startswith("prompt.") and re.search("[\ud800-\udfff]", str(value)):
            reject_value(name, value, "text in UTF-8")

    def _is_in_range(self, value: float) -> bool:
        return (
            (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def _format_range(self) -> str:
        bounds = {
            "above": self.above, "of at least": self.at_least, "of at most": self.at_most,
            "below": self.below,
        }  # fmt: skip
        return " and ".join(f"{w} {bound}" for w, bound in bounds.items() if bound is not None)


def is_finite(value: Any) -> bool:
    """Return True if the value is a finite number, and not a bool."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def _is_json(value: Any, *, is_flat: bool) -> bool:
    """Return True if JSON can represent the value. If `is_flat`, only scalars pass."""
    if isinstance(value, dict) and not is_flat:
        return all(isinstance(k, str) and _is_json(v, is_flat=False) for k, v in value.items())
    if isinstance(value, list | tuple) and not is_flat:
        return all(_is_json(item, is_flat=False) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def are_nonempty_strings(values: tuple[Any, ...]) -> bool:
    """Return True if all values are non-empty strings."""
    return all(isinstance(value, str) and value for value in values)


def reject_value(key: str, value: Any, expected: str) -> None:
    """Raise a ValueError that states a key's value and the expected value."""
    raise ValueError(f"config.{key} is {value!r}; expected {expected}.")


@dataclass(frozen=True)
class Rule:
    """Cross-key validation rule."""

    key: str  # key to change
    is_violated: Callable[[ConfigDict], bool]
    expected: str  # expected value of that key, with the reason


@dataclass(frozen=True, kw_only=True)
class ExtraKeys:
    """Keys of an extra, with cross-key rules."""

    keys: Mapping[str, Key] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()


def load_extra_keys(folder: str) -> ExtraKeys:
    """Load `KEYS` and `RULES` from an extra's `keys.py`; both are empty without it."""
    module = import_optional(f"jaxrl.extras.{folder}.keys:")
    if module is None:
        return ExtraKeys()
    return ExtraKeys(keys=module.KEYS, rules=getattr(module, "RULES", ()))


def import_optional(name: str) -> Any:
    """Import object `module:name` or module `module:`; return None if its folder is missing."""
    try:
        return pkgutil.resolve_name(name)
    except ModuleNotFoundError as error:
        if not name.replace(":", ".").startswith(f"{error.name}."):
            raise
        return None
