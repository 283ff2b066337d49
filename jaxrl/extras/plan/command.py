"""Implementation of `python -m jaxrl.launch --plan`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl.builders.capacity import GIB
from jaxrl.builders.resolved import ResolvedConfig
from jaxrl.extras.plan import advice, display, memory
from jaxrl.logs.console import make_console
from jaxrl.models.registry import read_architecture
from jaxrl.utils.text import escape_control_chars


def show_plan(
    config: ResolvedConfig,
    *,
    num_devices: int,
    num_processes: int,
    memory_gib: float,
    platform: str | None,
    num_passages: int,
    json_file: str | None,
) -> bool:
    """Print the memory plan of a run. If it does not fit, suggest settings that do.

    Args:
        config: Config of the run. `micro_rows=0` is replaced with the best value, in place.
        num_devices: Total number of devices; 0 for the devices of this host.
        num_processes: Number of processes that share the devices.
        memory_gib: Memory per device in GiB; 0 for the memory of this host's devices.
        platform: Device platform. None selects `gpu` if `memory_gib` is set, else this host's
            platform.
        num_passages: Number of passages for `search.dense`; 0 to count the lines of the corpus.
        json_file: Path to write the plan to as JSON, or None.

    Returns:
        True if the plan fits.

    Raises:
        FileNotFoundError: The model or the corpus is missing.
        ValueError: A config key or a flag is invalid.
    """
    # Build the target from the flags, with this host's values for flags that are not set.
    overrides: dict[str, Any] = {"num_processes": num_processes, "num_passages": num_passages}
    if num_devices:
        overrides["num_devices"] = num_devices
    if memory_gib:
        overrides |= {"memory_bytes": int(memory_gib * GIB), "platform": platform or "gpu"}
    elif platform:
        overrides["platform"] = platform
    if memory_gib or platform not in (None, "cpu"):
        overrides["free_bytes"] = None
    is_complete = {"num_devices", "memory_bytes", "platform"} <= overrides.keys()
    target = (
        memory.Target(**overrides) if is_complete else replace(memory.detect_target(), **overrides)
    )
    if target.num_devices % target.num_processes:
        raise ValueError(
            f"--plan_processes={target.num_processes} does not divide the {target.num_devices} "
            "devices."
        )
    model = read_architecture(config.model.path, config.model.architecture)
    # Plan, and search for settings if the plan does not fit.
    notes = advice.choose_micro_rows(config, model, target, must_fit=False)
    plan = memory.make_plan(config, model, target)
    suggestions = [] if plan.fits else advice.suggest_settings(config, model, target)
    num_needed = None
    if not plan.fits and not suggestions:
        num_needed = advice.find_num_devices(config, model, target)
    console = make_console(highlight=False, soft_wrap=True)
    for line in notes:
        console.print(escape_control_chars(line), markup=False, emoji=False)
    console.print(display.format_plan(plan, suggestions, num_needed))
    if target.platform == "cpu" and target.free_bytes is None and not memory_gib:
        console.print("free memory is unknown on this system, so runs are not checked against it")
    if json_file is not None:
        text = json.dumps(display.plan_to_json(plan), indent=2) + "\n"
        Path(json_file).write_text(text, encoding="utf-8")
    return plan.fits
