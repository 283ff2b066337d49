"""Fit a run's micro-batches and cache to the memory of its devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jaxrl.builders.capacity import format_bytes
from jaxrl.builders.resolved import ResolvedConfig
from jaxrl.extras.plan import memory
from jaxrl.models.architecture import Architecture
from jaxrl.models.registry import read_architecture
from jaxrl.runtime import distributed
from jaxrl.runtime.resume import read_record


def fit_memory(
    config: ResolvedConfig, workdir: Path, *, ignore_memory_plan: bool = False
) -> list[str]:
    """Replace each `micro_rows=0` with the best value that fits; return lines for the log.

    A resumed run keeps the values recorded in its workdir if they fit.

    Raises:
        ValueError: The plan exceeds a device's memory (on a CPU, the free memory at the first
            start), and `ignore_memory_plan` is False.
    """
    record = read_record(workdir, accept_changes=True)
    recorded_config = record.config if record else {}
    target = memory.detect_target()
    model = read_architecture(config.model.path, config.model.architecture)
    # All processes must select the same values.
    sizes, free = zip(*distributed.gather((target.memory_bytes, target.free_bytes)), strict=True)
    target = replace(
        target, memory_bytes=min(sizes), free_bytes=None if None in free else min(free)
    )
    is_cpu = target.platform == "cpu"
    notes = []
    if not all(
        config.get_optimizer_section(stage).micro_rows for stage in config.num_steps_by_stage
    ):
        from jaxrl.extras.plan.advice import choose_micro_rows  # rarely needed

        must_fit = not (is_cpu or ignore_memory_plan)
        notes = choose_micro_rows(config, model, target, recorded_config, must_fit=must_fit)
    if is_cpu and target.free_bytes is None:
        return notes  # free memory is unknown
    peak = memory.make_plan(config, model, target).peak_bytes
    if peak > target.limit_bytes:
        available = "but {} are free" if is_cpu else "but each has {}"
        message = (
            f"the plan needs {format_bytes(peak)} on each device, "
            f"{available.format(format_bytes(target.limit_bytes))}; "
            "--plan suggests changes"
        )
        # Free memory changes constantly, so it never prevents a resume.
        if not ignore_memory_plan and not (is_cpu and record):
            raise ValueError(f"{message}, {memory.IGNORE_PLAN_HINT}.")
        notes.append(f"warning: {message}")
    return notes


def compute_num_cache_pages(config: ResolvedConfig, model: Architecture, page_tokens: int) -> int:
    """Return the number of cache pages of `page_tokens` tokens that fit on a local device.

    The plan assumes the first candidate kernels; the run's kernels and page size may differ.
    """
    target = memory.detect_target()
    planned = memory.count_cache_pages(config, model, target)
    return planned * memory.get_page_size(config, model, target) // page_tokens
