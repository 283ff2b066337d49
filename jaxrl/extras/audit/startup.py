"""Check training tasks against the corpus at the start of a run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.builders.resolved import ResolvedConfig
from jaxrl.data.stream import Mixture
from jaxrl.data.tasks import Tasks
from jaxrl.envs.base import Task
from jaxrl.envs.search.corpus import (
    check_corpus,
    compute_corpus_digest,
    get_index_folder,
    read_corpus,
)
from jaxrl.extras.audit.coverage import find_unanswerable_tasks
from jaxrl.runtime import distributed
from jaxrl.utils.files import open_atomic
from jaxrl.utils.json_io import read_object

NUM_SAMPLES = 200
"""Number of training tasks to check at the start of a run."""

MAX_CORPUS_BYTES = 2**25
"""Maximum size of a corpus that is checked at the start of a run. The check takes seconds."""

RECORD_FILE = "unanswerable.json"
"""File in the workdir that lists the dropped tasks."""


def audit_tasks(
    c: ResolvedConfig,
    tasks: Mixture[Task],
    *,
    workdir: Path | None,
    show: Callable[[str], None],
) -> tuple[Mixture[Task], list[str]]:
    """Check training tasks against the corpus, and drop unanswerable tasks if configured.

    Returns:
        The tasks to train on, and lines for the log.

    Raises:
        FileNotFoundError, ValueError: The corpus is missing or malformed, or all tasks of a source
            would be dropped.
    """
    settings = c.search[c.corpus_section]
    corpus, index = Path(settings.corpus), get_index_folder(settings.corpus, settings.index)
    check_corpus(corpus, section=f"search.{c.corpus_section}")
    if c.filter.unanswerable == "drop":
        return _drop_unanswerable_tasks(tasks, corpus, index, workdir, show)
    if not distributed.is_main():
        return tasks, []
    if (size := corpus.stat().st_size) > MAX_CORPUS_BYTES:
        return tasks, [
            f"audit: the corpus has {size / 2**30:.1f} GiB; jaxrl audit --config=... counts the "
            "tasks without an accepted answer in it"
        ]
    show(f"looking for answers in {corpus}")
    samples = sample_tasks(tasks, NUM_SAMPLES, seed=c.seed)
    flags, num_checked = find_unanswerable_tasks(samples, read_corpus(corpus))
    if not any(flags):
        return tasks, []
    return tasks, [
        f"audit: {sum(flags) / num_checked:.1%} of {num_checked} sampled training tasks have an "
        "accepted answer in no document (jaxrl audit --config=... lists them)"
    ]


def sample_tasks(tasks: Sequence[Task], num_tasks: int, *, seed: int) -> list[Task]:
    """Sample `num_tasks` tasks, or return all if `num_tasks` is 0, in their original order."""
    if not 0 < num_tasks < len(tasks):
        return list(tasks)
    indices = np.random.default_rng(seed).choice(len(tasks), num_tasks, replace=False)
    return [tasks[index] for index in sorted(indices.tolist())]


def _drop_unanswerable_tasks(
    tasks: Mixture[Task],
    corpus: Path,
    index: Path,
    workdir: Path | None,
    show: Callable[[str], None],
) -> tuple[Mixture[Task], list[str]]:
    # The dropped tasks depend only on tasks and corpus. A resumed run reads the saved list.
    hasher = hashlib.sha256(compute_corpus_digest(corpus, index).encode())
    for task in tasks:
        hasher.update(json.dumps([task.id, task.answers]).encode())
    record = {"digest": hasher.hexdigest()}
    file = workdir / RECORD_FILE if workdir else None
    saved: dict[str, Any] = read_object(file) if file and file.exists() else {}
    if saved.get("digest") == record["digest"]:
        dropped = saved["dropped"]
    else:
        show(f"looking for the answers of {len(tasks):,} tasks in {corpus}")
        flags, _ = find_unanswerable_tasks(tasks, read_corpus(corpus))
        dropped = [task.id for task, flag in zip(tasks, flags, strict=True) if flag]
    dropped = distributed.broadcast(dropped)
    if file and distributed.is_main():
        file.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(file) as stream:
            stream.write(json.dumps(record | {"dropped": dropped}) + "\n")
    # Drop the tasks from each source.
    ids, sources = set(dropped), []
    for source in tasks.sources:
        mask = np.fromiter((task.id not in ids for task in source.items), bool)
        if not mask.any():
            raise ValueError(
                f"no task of {source.name or 'config.tasks.train'} has an accepted answer in "
                f"{corpus}, and config.filter.unanswerable='drop' would leave none; check the "
                "corpus, or set the key to 'keep'."
            )
        items = source.items
        kept_items = (
            items.select(mask)
            if isinstance(items, Tasks)
            else [task for task, is_kept in zip(items, mask, strict=True) if is_kept]
        )
        sources.append(dataclasses.replace(source, items=kept_items))
    note = f"audit: {len(ids):,} of {len(tasks):,} training tasks have an accepted answer in no "
    return Mixture(sources), [f"{note}document and are left out (config.filter.unanswerable)"]
