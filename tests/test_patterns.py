"""Regular expressions of the package take time in proportion to the text, whoever wrote that."""

import ast
import importlib
import re
import time
from re import _compiler as compiler
from re import _constants as kinds
from re import _parser as parser
from types import SimpleNamespace

import pytest

from jaxrl.envs.rewards import math_answers
from jaxrl.extras.endpoints import judges
from tests.helpers import ROOT

METHODS = ("search", "match", "fullmatch", "sub", "subn", "split", "findall", "finditer")
SIZE = 1_000_000  # characters
LIMIT_S = 0.5

EXAMPLES = {
    # Names in patterns that functions make: an example of each.
    "names": "think|search|information|answer",
    "name": "enable_thinking",
    "by_length": ["<|im_start|>", "<|im_end|>"],
    "form": "hunter2",
    "good": r"(?:<(search)></\1><information></information>)*<answer></answer>",
    "pattern": judges.SCORE,
    "self": SimpleNamespace(pattern=judges.SCORE),
    "asked": {"pattern": judges.SCORE, "text": ""},
}

BOUNDED = {
    # Patterns that never meet longer texts, and the constant that sees to it.
    "math_answers:_NUMBER": math_answers._MAX_MATH,
    "math_answers:_ASSIGNMENT": math_answers._MAX_MATH,
    "math_answers:_UNIT_POWER": math_answers._MAX_MATH,
    "math_answers:_THOUSANDS": math_answers._MAX_MATH,
}


def calls(path):
    """Calls of functions of `re`, with the name that a compiled pattern gets."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {
        id(node.value): node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    used = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used.setdefault(node.value.id, set()).add(node.attr)
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=method)):
                name = names.get(id(node), "")
                found = used.get(name, set()) & set(METHODS) or {"findall"}
                if method in (*METHODS, "compile"):
                    yield node, name, found if method == "compile" else {method}


def patterns():
    """Each pattern: where it stands, a method by which it meets texts, and how long these are."""
    for path in sorted((ROOT / "jaxrl").rglob("*.py")):
        name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for node, variable, methods in calls(path):
            scope = EXAMPLES | vars(importlib.import_module(name)) | {"re": re}
            flags = {one.arg: one.value for one in node.keywords}.get("flags")
            if node.func.attr == "compile" and len(node.args) > 1:
                flags = node.args[1]
            flags = eval(ast.unparse(flags), scope) if flags is not None else 0
            pattern = re.compile(eval(ast.unparse(node.args[0]), scope), flags)
            for method in sorted(methods):
                place = f"{path.stem}:{variable or node.lineno}"
                yield place, pattern, method, BOUNDED.get(place, SIZE)


def samples(tree):
    """A short text for each part of a parsed pattern, in order."""
    for kind, value in tree:
        match kind:
            case kinds.LITERAL:
                yield chr(value)
            case kinds.IN | kinds.NOT_LITERAL | kinds.ANY:
                single = parser.SubPattern(tree.state, [(kind, value)])
                matches = compiler.compile(single, 0).fullmatch
                characters = (*' a1,.-\n(<"_/#A', *map(chr, range(0x3100)), "\ue000", "\ud800")
                yield next(filter(matches, characters), "")
            case kinds.BRANCH:
                for branch in value[1]:
                    yield from samples(branch)
            case kinds.SUBPATTERN:
                yield from samples(value[3])
            case kinds.MAX_REPEAT | kinds.MIN_REPEAT | kinds.POSSESSIVE_REPEAT:
                for _ in range(max(1, value[0])):
                    yield from samples(value[2])


def worst_texts(pattern):
    """Beginnings and what is repeated behind them: prefixes of matches, and parts of these."""
    parts = [part for part in samples(parser.parse(pattern.pattern, pattern.flags)) if part]
    found = {("", part) for part in parts}
    for end in range(1, len(parts) + 1):
        prefix = "".join(parts[:end])
        found.add(("", prefix))
        for part in range(max(0, end - 3), min(len(parts), end + 2)):
            found |= {(prefix, parts[part]), (prefix, "".join(parts[part : part + 2]))}
    return sorted(found)


def seconds(pattern, method, case, size):
    (prefix, repeated), tail = case
    text = (prefix + repeated * (size // len(repeated)))[:size] + tail
    if isinstance(pattern.pattern, bytes):
        text = text.encode("latin-1")
    arguments = (text[:0], text) if method in ("sub", "subn") else (text,)
    began = time.thread_time()
    found = getattr(pattern, method)(*arguments)
    for _ in found if method == "finditer" else ():
        pass
    return time.thread_time() - began


def slow_case(pattern, method, size):
    """A text that takes too long; None without one."""
    cases = [(text, tail) for text in worst_texts(pattern) for tail in ("", "\x00", "a\n")]
    # Exponential time shows in tens of characters, and would not end with more; quadratic time
    # shows before the longest text, which is for the worst case alone.
    shorter = [(length, len(cases)) for length in range(16, 44, 4)]
    for length, kept in (*shorter, (2_000, 4), (30_000, 2), (200_000, 1), (size, 1)):
        timed = []
        for case in cases:
            took = seconds(pattern, method, case, min(length, size))
            if took > LIMIT_S:  # again: the first time Python may have looked for garbage
                took = seconds(pattern, method, case, min(length, size))
            if took > LIMIT_S:
                return case
            timed.append((took, case))
        cases = [case for _, case in sorted(timed)[-kept:]]
    return None


def test_time_is_in_proportion_to_the_text():
    found = [*patterns()]
    assert len(found) > 50
    slow = {place: slow_case(*rest) for place, *rest in found}
    assert {place: case for place, case in slow.items() if case} == {}


@pytest.mark.parametrize("slow", [r"score\W{0,3}(?:\([^)\n]*\))?:", "<a>(.*?)</a>", r"(a|aa)+$"])
def test_a_pattern_of_quadratic_time_would_be_found(slow):
    assert slow_case(re.compile(slow), "findall", 100_000)  # half of it takes about LIMIT_S
