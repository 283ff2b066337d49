"""Answers questions that may take forever: a process of its own, which may be killed.

It is run as a file, without the rest of jaxrl, by `worker_pool`. Each line of its input is a JSON
object, each line of its output what became of it. A question that takes more computing time than
allowed ends the process by SIGPROF, whatever it is doing: what hangs is often one operation on
whole numbers, or one match of a pattern, which no exception can interrupt.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO


def main() -> None:
    """Answers lines until there are no more.

    Arguments of the command: a name of `KINDS`, seconds of computing time for a question, MiB of
    memory.
    """
    kind, seconds, memory_mib = KINDS[sys.argv[1]], float(sys.argv[2]), int(sys.argv[3])
    # What a library prints is not an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer = kind()
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))
    _tell(answers, {"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            reply = answer(asked)
        except Exception as error:  # MemoryError and RecursionError too
            reply = {"error": type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _tell(answers, reply)


def _tell(answers: TextIO, reply: Mapping[str, Any]) -> None:
    answers.write(json.dumps(reply) + "\n")
    answers.flush()


def search() -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Finds what the one group of a `pattern` holds at its last match in a `text`; None without."""
    import re

    def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
        matches = re.findall(asked["pattern"], asked["text"])
        return {"found": matches[-1] if matches else None}

    return answer


def comparison() -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Says whether an `answer` is one of the `truths`, all LaTeX, by the values of expressions.

    Only an expression that is read whole counts: math-verify could also look for a number anywhere
    in the text, by which an answer with several numbers would be right. The time limits of
    math-verify need signal handlers, which do not run inside of one operation; they are off.
    """
    import logging

    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)
    latex = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(text: str) -> list:
        return parse(
            f"\\boxed{{{text}}}",
            extraction_config=latex,
            fallback_mode="no_fallback",
            parsing_timeout=None,
            raise_on_error=True,
        )

    def same(answer: str, truth: str) -> bool:
        return bool(verify(read(truth), read(answer), timeout_seconds=None, raise_on_error=True))

    def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
        return {"equal": any(same(asked["answer"], truth) for truth in asked["truths"])}

    same("x", "x")  # what is loaded at the first call is loaded now
    return answer


def schema() -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Checks the JSON `arguments` of a call by a JSON `schema`, or without them the schema itself.

    Patterns are left to the server that the schema is of: it may mean another dialect.
    """
    import functools

    import jsonschema
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012, EMPTY_REGISTRY

    # A tree of arguments takes some ten calls for each of its levels.
    sys.setrecursionlimit(5_000)
    kind = jsonschema.validators.extend(
        jsonschema.Draft202012Validator,
        {**dict.fromkeys(("pattern", "patternProperties"), _unchecked), "uniqueItems": _unique},
    )

    @functools.lru_cache(maxsize=64)
    def checker(text: str) -> Any:
        # Without a registry it would fetch what a schema refers to from anywhere.
        return kind(json.loads(text), registry=EMPTY_REGISTRY)

    def problem_of(schema: Mapping[str, Any]) -> str | None:
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError as error:
            return str(error.message[:500])
        root = DRAFT202012.create_resource(schema)
        resolver = EMPTY_REGISTRY.resolver_with_root(root)
        waiting = [(resolver.in_subresource(root), root)]
        while waiting:
            resolver, resource = waiting.pop()
            if isinstance(resource.contents, Mapping):
                for name in ("$ref", "$dynamicRef"):
                    if isinstance(reference := resource.contents.get(name), str):
                        try:
                            resolver.lookup(reference)
                        except Unresolvable:
                            return f"it refers to {reference[:500]!r}, which is not in it"
            waiting += [(resolver.in_subresource(one), one) for one in resource.subresources()]
        return None

    def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
        if "arguments" not in asked:
            return {"problem": problem_of(json.loads(asked["schema"]))}
        # One is enough, and all of them may be very many.
        error = next(checker(asked["schema"]).iter_errors(asked["arguments"]), None)
        if error is None:
            return {"problem": None}
        where = "".join(f"[{key!r}]" for key in error.absolute_path)
        return {"problem": f"arguments{where}: {error.message[:500]}"}

    return answer


def _unchecked(*_: Any) -> None:
    """A keyword of a schema that is not looked at."""


def _unique(validator: Any, is_unique: bool, items: Any, _: Any) -> Any:
    """The keyword `uniqueItems`; jsonschema compares each item with every other."""
    import jsonschema

    is_checked = is_unique and validator.is_type(items, "array")
    if is_checked and len({_hashable(item) for item in items}) < len(items):
        yield jsonschema.ValidationError(f"{items!r} has non-unique elements")


def _hashable(value: Any) -> Any:
    """Equal for values that JSON Schema calls equal: 1 and 1.0 are, true and 1 are not."""
    if isinstance(value, dict):
        return frozenset((name, _hashable(one)) for name, one in value.items())
    if isinstance(value, list):
        return tuple(map(_hashable, value))
    return (bool, value) if isinstance(value, bool) else value


KINDS = {"math": comparison, "pattern": search, "schema": schema}
"""Kinds of workers by name."""


if __name__ == "__main__":
    main()
