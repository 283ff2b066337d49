"""A key of the configuration, a rule between keys, and the keys of optional capabilities.

`schema.py` has the keys of the core. A folder of `extras/` has its own in `keys.py`, which imports
nothing else of the capability.
"""

from __future__ import annotations

import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from ml_collections import ConfigDict

from jaxrl.utils.concurrency import MAX_S

FREE = "free"
"""A restart may change it: results stay the same, to rounding."""
EVALUATION = "evaluation"
"""A restart may change it unless evaluations steer training: it decides what they measure."""
TRAINING = "training"
"""Another value makes another experiment, but an evaluation alone may change it."""
RESULTS = "results"
"""Another value makes another experiment."""

MODEL = "a model"
"""A path to a folder of weights and their small files."""
CORPUS = "a corpus"
"""A path to one file of documents or vectors, beside whose index its hash is kept."""

DTYPES = ("float32", "bfloat16")
REPLAY = ("off", "record", "only")


@dataclass(frozen=True)
class Key:
    """One key: what is known of it by itself."""

    default: Any  # None: a switch whose default depends on the platform
    meaning: str  # with its unit; Markdown
    _: KW_ONLY
    restart: str = ""  # "": as its section, see `schema.RESTART`
    above: float | None = None  # bounds of a number
    at_least: float | None = None
    at_most: float | None = None
    below: float | None = None
    one_of: tuple[Any, ...] = ()  # choices; a name that a table holds is checked beside the table
    some_of: tuple[str, ...] = ()  # choices for the entries of a tuple
    is_valid: Callable[[Any], bool] | None = None  # what else holds of it
    expected: str = ""  # told with a refusal; "": as the fields above say
    example: Any = None  # value of a mapping whose names are not ours, for messages
    is_nested: bool = False  # the values of such a mapping may be lists and mappings
    group: str = ""  # of entry points, whose names it takes too
    names_code: bool = False  # its value may be the dotted name of a function of one's own
    required: str = ""  # expected in place of an empty text where a run reads the key's section
    holds: str = ""  # `MODEL` or `CORPUS`, of a path whose content a start that goes on compares
    file: str = ""  # in the folder that the key names, whose content is compared likewise
    written_to: str = ""  # folder of the workdir into which a run exports the like
    # True where checkpoints hold what the key decides: no start that goes on may change it.
    is_fixed: Callable[[ConfigDict], Any] | None = None

    def check(self, name: str, value: Any) -> None:
        """Refuse a value of another type, out of range or none of the choices.

        ml_collections accepts None for anything and a bool for a number.

        Raises:
            ValueError: The message says what the key holds and what is expected.
        """
        is_number = isinstance(self.default, int | float) and not isinstance(self.default, bool)
        if isinstance(self.default, float):
            if not is_finite(value):
                refuse(name, value, f"a finite number, such as {self.default!r}")
        elif self.default is None:
            if value is not None and not isinstance(value, bool):
                refuse(name, value, "True, False or None")
        elif type(value) is not type(self.default):
            expected = f"a value of type {type(self.default).__name__}, as {self.default!r}"
            refuse(name, value, expected)
        if self.one_of and value not in self.one_of:
            choices = ", ".join(str(choice) or repr(choice) for choice in self.one_of)
            refuse(name, value, self.expected or f"one of {choices}")
        if self.some_of and not all(choice in self.some_of for choice in value):
            refuse(name, value, f"a tuple out of {self.some_of}")
        if is_number and not self._is_in_range(value):
            refuse(name, value, self.expected or f"a number {self._range()}")
        if name.endswith("_s") and is_number and value > MAX_S:
            refuse(name, value, f"at most {MAX_S:g} seconds, which are 31 years")
        if isinstance(self.default, dict):
            kinds = "true, false, a number or a text each"
            kinds += ", or lists of these" * self.is_nested
            for inner, item in value.items():
                if not isinstance(inner, str) or not _is_plain(item, is_flat=not self.is_nested):
                    refuse(name, value, f"names with {kinds}, as {{'name': {self.example!r}}}")
        if self.is_valid is not None and not self.is_valid(value):
            refuse(name, value, self.expected)
        if name.startswith("prompt.") and re.search("[\ud800-\udfff]", str(value)):
            refuse(name, value, "text in UTF-8")

    def _is_in_range(self, value: float) -> bool:
        return (
            (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def _range(self) -> str:
        bounds = {
            "above": self.above, "of at least": self.at_least, "of at most": self.at_most,
            "below": self.below,
        }  # fmt: skip
        return " and ".join(f"{w} {bound}" for w, bound in bounds.items() if bound is not None)


def is_finite(value: Any) -> bool:
    """Return True for a number that a float can hold. A bool is not a number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def _is_plain(value: Any, *, is_flat: bool) -> bool:
    """Return True for values that JSON can hold."""
    if isinstance(value, dict) and not is_flat:
        return all(isinstance(k, str) and _is_plain(v, is_flat=False) for k, v in value.items())
    if isinstance(value, list | tuple) and not is_flat:
        return all(_is_plain(item, is_flat=False) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def are_texts(values: tuple[Any, ...]) -> bool:
    """Return True for texts that are not empty."""
    return all(isinstance(value, str) and value for value in values)


def refuse(key: str, value: Any, expected: str) -> None:
    """Raise a ValueError that says what a key holds and what was expected."""
    raise ValueError(f"config.{key} is {value!r}; expected {expected}.")


@dataclass(frozen=True)
class Rule:
    """A combination of keys that is refused or warned about."""

    key: str  # the key to change
    is_broken: Callable[[ConfigDict], bool]
    expected: str  # instead, and why


@dataclass(frozen=True, kw_only=True)
class ExtraKeys:
    """Keys of an optional capability, rules between them, and settings that are unusual."""

    keys: Mapping[str, Key] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    warnings: tuple[Rule, ...] = ()

    def section(self, prefix: str) -> dict[str, Key]:
        """Return the keys of a section, or the key of that name."""
        return {name: key for name, key in self.keys.items() if f"{name}.".startswith(f"{prefix}.")}


def load_extra_keys(folder: str) -> ExtraKeys:
    """Load `KEYS`, `RULES` and `WARNINGS` of a folder's `keys.py`; nothing if it is missing."""
    module = optional(f"jaxrl.extras.{folder}.keys:")
    if module is None:
        return ExtraKeys()
    return ExtraKeys(
        keys=module.KEYS,
        rules=getattr(module, "RULES", ()),
        warnings=getattr(module, "WARNINGS", ()),
    )


def optional(name: str) -> Any:
    """Return the object `module:name`, or the module `module:`; None if its folder was deleted."""
    try:
        return pkgutil.resolve_name(name)
    except ModuleNotFoundError as error:
        if not name.replace(":", ".").startswith(f"{error.name}."):
            raise
        return None
