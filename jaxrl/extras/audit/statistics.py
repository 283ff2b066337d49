"""Audit statistics: coverage, retrieval, answers, duplicates and prompt lengths."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.builders.components import (
    build_image_processor,
    open_all_tasks,
    read_model_and_tokenizer,
)
from jaxrl.builders.environment import build_environment, build_search_engine, build_tools
from jaxrl.builders.method import build_from_section
from jaxrl.builders.resolved import NO_ENGINE, ResolvedConfig
from jaxrl.data.tasks import hash_questions
from jaxrl.envs.base import Env, Episode, Task, ToolError, Turn
from jaxrl.envs.math_env import MathEnv
from jaxrl.envs.rewards.qa import normalize_answer
from jaxrl.envs.search.base import DocumentSearch, EmptySearch
from jaxrl.envs.search.corpus import read_corpus
from jaxrl.envs.search_env import SearchEnv
from jaxrl.extras.audit.coverage import (
    Phrase,
    are_all_missing,
    find_phrases,
    get_searchable_answers,
)
from jaxrl.extras.audit.startup import sample_tasks
from jaxrl.runtime.sharding import make_mesh
from jaxrl.sampling.episodes import BaseRollout, TokenLimits
from jaxrl.utils.callables import is_dotted_path

DEPTHS = (1, 3, 5, 10)
"""Numbers k of retrieved documents for which recall is computed."""

NEAR_LIMIT = 0.9
"""Fraction of the prompt limit above which a prompt is near the limit."""

ANSWER_FORMS = (
    "<answer>{}</answer>",
    "<think></think><answer>\\boxed{{{}}}</answer>",
    "Answer: {}",
)
"""Responses that contain only an answer, in the protocols of the built-in environments."""

_QUERY_BATCH = 256

Statistic = dict[str, Any]
"""Count, total, fraction, and ids of the counted tasks."""


def compute_statistics(
    c: ResolvedConfig, *, max_tasks: int, show: Callable[[str], None], log: Callable[[str], None]
) -> dict[str, dict[str, Statistic]]:
    """Compute the statistics by split and name, omitting those that do not apply to the run.

    Args:
        c: Resolved configuration.
        max_tasks: Maximum number of tasks to sample from each split; 0 for no limit. Duplicates are
            always counted over all tasks.
        show: Function that displays the current activity.
        log: Function that logs a message.

    Raises:
        FileNotFoundError, ValueError: A file or a setting is invalid.
        OutageError: The search server does not respond.
    """
    # Build the run's environment, tasks and prompts without an index or weights.
    mesh = make_mesh(**c.mesh)
    architecture, tokenizer = read_model_and_tokenizer(c, mesh, is_local=False)
    tools = build_tools(c, log)
    env = build_environment(c, None if c.search.engine == NO_ENGINE else EmptySearch(), tools)
    limits = build_from_section(TokenLimits, c.rollout)
    processor = build_image_processor(c, tokenizer, architecture)
    names = {source.environment for sources in c.task_sources.values() for source in sources}
    rollout = BaseRollout(dict.fromkeys(names, env), tokenizer, limits, processor=processor)
    has_known_forms = not (is_dotted_path(c.env.name) or is_dotted_path(c.env.search.protocol))
    has_known_forms = has_known_forms and isinstance(env, SearchEnv | MathEnv)
    parts = [p for p in c.environment_parts if p != "format" and c.reward_weights.get(p)]
    parts = [*dict.fromkeys([*parts, c.correctness_part])]
    splits = dict(zip(("training", "held-out"), open_all_tasks(c, show), strict=True))
    samples = {
        name: sample_tasks(tasks, max_tasks, seed=c.seed) for name, tasks in splits.items() if tasks
    }
    statistics: dict[str, dict[str, Statistic]] = {name: {} for name in samples}
    phrases = {
        name: [get_searchable_answers(task) for task in tasks] for name, tasks in samples.items()
    }
    # Coverage of the corpus, for all splits in one pass.
    present_phrases = None
    if section := c.corpus_section:
        corpus = c.search[section].corpus
        show(f"looking for answers in {corpus}")
        groups = [group for split in phrases.values() for group in split]
        present_phrases = find_phrases(set().union(*groups), read_corpus(Path(corpus)))
    elif c.needs_live_engine:
        engine_name = f"config.search.engine={c.search.engine!r}"
        log(f"{engine_name} names no corpus file: answers are not looked up in documents")
    engine = build_search_engine(c, show, None, log).engine if c.needs_live_engine else None
    for name, tasks in samples.items():
        add, is_checked = statistics[name].__setitem__, [bool(group) for group in phrases[name]]
        add("no answer to look for", count_flags([not x for x in is_checked], tasks))
        if present_phrases is not None:
            flags = [are_all_missing(group, present_phrases) for group in phrases[name]]
            add("answer in no document", count_flags(flags, tasks, is_checked))
        if isinstance(engine, DocumentSearch):
            show(f"searching for the {len(tasks):,} {name} questions")
            ranks = find_answer_ranks(engine, tasks, phrases[name])
            has_rank = [rank is not None for rank in ranks]
            for depth in DEPTHS:
                flags = [rank is not None and rank < depth for rank in ranks]
                add(
                    f"answer found by the question, k={depth}",
                    count_flags(flags, tasks, has_rank),
                )
        if has_known_forms:
            add("answers that earn nothing", count_unrewarded_answers(env, parts, tasks))
        # Duplicates, among all tasks of the split.
        everything, hashes = splits[name], hash_questions(splits[name])
        add("question repeated", count_flags(flag_repeated_rows(hashes), everything))
        others = [hash_questions(splits[other]) for other in samples if other != name]
        if others:
            known = {*others[0].ravel().tolist()}
            flags = [not known.isdisjoint(row) for row in hashes.tolist()]
            add("question in both splits", count_flags(flags, everything))
        # Prompts.
        if not c.has_custom_rollout:
            limit = rollout.prompt_limit
            lengths = [len(rollout.render_prompt(task)) for task in tasks]
            flags = [NEAR_LIMIT * limit < length <= limit for length in lengths]
            add("prompt near the limit", count_flags(flags, tasks))
            flags = [length > limit for length in lengths]
            add("prompt over the limit", count_flags(flags, tasks))
    return statistics


def count_flags(
    flags: Sequence[bool], tasks: Iterable[Task], is_included: Sequence[bool] | None = None
) -> Statistic:
    """Return the number and ids of flagged tasks, and the fraction of tasks that are flagged."""
    total = len(flags) if is_included is None else sum(is_included)
    ids = [task.id for task, flag in zip(tasks, flags, strict=True) if flag]
    return {"count": len(ids), "of": total, "share": len(ids) / max(total, 1), "tasks": ids}


def find_answer_ranks(
    engine: DocumentSearch, tasks: Sequence[Task], phrases: Sequence[set[Phrase]]
) -> list[float | None]:
    """Return, for each task, the rank (from 0) of the first document with an accepted answer.

    The rank is infinite if none of the first `max(DEPTHS)` documents has an answer. It is None if
    the task has no answer to search for, or if the search failed.
    """
    ranks: list[float | None] = []
    for start in range(0, len(tasks), _QUERY_BATCH):
        batch = slice(start, start + _QUERY_BATCH)
        results = engine.retrieve([get_question(task) for task in tasks[batch]], max(DEPTHS))
        for answers, hits in zip(phrases[batch], results, strict=True):
            if isinstance(hits, ToolError) or not answers:
                ranks.append(None)
                continue
            matches = (bool(find_phrases(answers, [hit.document])) for hit in hits)
            ranks.append(next((rank for rank, match in enumerate(matches) if match), math.inf))
    return ranks


def get_question(task: Task) -> str:
    """Return the question of a task, or the last user message of a chat."""
    if task.question is not None:
        return task.question
    texts = [m["content"] for m in task.messages or () if m["role"] == "user"]
    return texts[-1] if texts else ""


def count_unrewarded_answers(env: Env, parts: Sequence[str], tasks: Sequence[Task]) -> Statistic:
    """Count the accepted answers that at least one of the reward parts never rewards.

    Each accepted answer is scored as if it were the only one of its task. It is submitted verbatim
    and normalized, in every response form in `ANSWER_FORMS`.

    Args:
        env: Built-in environment.
        parts: Names of the environment's reward parts.
        tasks: Tasks to check.
    """
    num_unpaid, ids = 0, []
    for task in tasks:
        num_before = num_unpaid
        for truth in task.answers:
            unpaid, single = {*parts}, dataclasses.replace(task, answers=(truth,))
            for form in ANSWER_FORMS:
                for answer in dict.fromkeys((truth, normalize_answer(truth))):
                    if unpaid:
                        episode = Episode(task=single, turns=[Turn(text=form.format(answer))])
                        [reward] = env.score([episode])
                        unpaid -= {part for part in unpaid if reward.parts[part] > 0}
            num_unpaid += bool(unpaid)
        if num_unpaid > num_before:
            ids.append(task.id)
    total = sum(len(task.answers) for task in tasks)
    return {"count": num_unpaid, "of": total, "share": num_unpaid / max(total, 1), "tasks": ids}


def flag_repeated_rows(hashes: np.ndarray) -> list[bool]:
    """Return a flag per row of `hashes`, uint64 [N, 2]: True if an earlier row shares a hash."""
    seen: set[int] = set()
    flags = []
    for row in hashes.tolist():
        flags.append(not seen.isdisjoint(row))
        seen.update(row)
    return flags
