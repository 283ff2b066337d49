"""Format a plan as a table or as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxrl.builders.capacity import choose_byte_unit, format_bytes
from jaxrl.extras.plan.advice import Suggestion
from jaxrl.extras.plan.memory import USABLE_SHARE, Plan


def format_plan(plan: Plan, advice: Sequence[Suggestion], num_needed: int | None) -> Group:
    """Format the plan as a table, with suggestions if it does not fit.

    Args:
        plan: Memory plan of a run.
        advice: Suggested settings; empty if the plan fits.
        num_needed: Number of devices on which the run fits; None if unknown.
    """
    # One row per phase, followed by its permanent terms and the terms of each moment.
    target, sizes = plan.target, plan.mesh
    mesh = ", ".join(f"{name}={size}" for name, size in sizes.items())
    processes = f" of {target.num_processes} processes" if target.num_processes > 1 else ""
    title = f"one of {target.num_devices} {target.platform} devices{processes} ({mesh})"
    table = Table(title=title)
    table.add_column("part")
    unit, scale = choose_byte_unit(plan.peak_bytes)
    table.add_column(unit, justify="right")
    for phase in plan.phases:
        table.add_row(f"[bold]{phase.name}[/bold]", f"[bold]{phase.peak_bytes / scale:.2f}[/bold]")
        for name, size in phase.persistent.items():
            table.add_row(f"  {name}", f"{size / scale:.2f}")
        for moment, terms in phase.moments.items():
            mark = " (the peak)" if moment == phase.peak_moment else ""
            table.add_row(f"  during: {moment}{mark}", f"{sum(terms.values()) / scale:.2f}")
            for name, size in terms.items():
                table.add_row(f"    {name}", f"{size / scale:.2f}")
        table.add_section()
    # Lines below the table: sizes, the verdict, and advice.
    qualifier = "" if target.free_bytes is None else " that are free"
    is_partial = plan.num_trained != plan.num_params
    trained = f", {plan.num_trained:,} are trained" if is_partial else ""
    lines = [
        f"{plan.num_params:,} parameters{trained}",
        f"at most {plan.tokens_per_step:,} tokens per step",
        *(f"{name}: {shape}" for name, shape in plan.shapes.items()),
        f"{'fits' if plan.fits else 'does not fit'}: {format_bytes(plan.peak_bytes)} at the peak, "
        f"{format_bytes(target.usable_bytes)} may be used "
        f"({USABLE_SHARE:.0%} of {format_bytes(target.limit_bytes)}{qualifier})",
    ]
    peak_phase = max(plan.phases, key=lambda phase: phase.peak_bytes)
    peak_terms = peak_phase.persistent | peak_phase.moments[peak_phase.peak_moment]
    top_names = sorted(peak_terms, key=lambda name: -peak_terms[name])[:2]
    largest = ", ".join(f"{name} {format_bytes(peak_terms[name])}" for name in top_names)
    lines.append(f"largest terms, in {peak_phase.name}: {largest}")
    for option in advice:
        settings = " ".join(f"--config.{key}={value}" for key, value in option.settings.items())
        lines.append(f"would fit with {settings}: {format_bytes(option.needed_bytes)}")
    if not plan.fits and not advice:
        device_hint = (
            f"{num_needed} such devices would suffice (plan for them)"
            if num_needed
            else "more devices do not help"
        )
        lines.append(f"no change of settings makes it fit on these devices; {device_hint}")
    return Group(table, *(Text(line) for line in lines))


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Convert the plan to a JSON object, with sizes in bytes."""
    phases = [
        {**dataclasses.asdict(phase), "moment": phase.peak_moment, "peak": phase.peak_bytes}
        for phase in plan.phases
    ]
    totals = {"peak": plan.peak_bytes, "usable": plan.target.usable_bytes, "fits": plan.fits}
    return {**dataclasses.asdict(plan), "phases": phases, **totals}
