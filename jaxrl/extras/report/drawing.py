"""Charts as pictures: SVG that follows the page's colours, and PNG files. No pyplot, no state."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, StrMethodFormatter

from jaxrl.extras.report.curves import Chart, Series
from jaxrl.extras.report.facts import STAGES
from jaxrl.utils.files import taking_place
from jaxrl.utils.text import printable

# Okabe and Ito's colours, told apart by colour-blind readers too. The page renames them to
# variables of its style sheet, which has lighter ones for dark backgrounds.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9")
INK, SOFT, GRID = "#1c1e21", "#5b6270", "#dfe2e7"
VARIABLES = {
    **{color: f"var(--series-{index})" for index, color in enumerate(COLORS)},
    INK: "var(--ink)",
    SOFT: "var(--soft)",
    GRID: "var(--line)",
}
# As many as colours: the page's style sheet has the same ones.
DASHES = (
    "-",
    (0, (5, 2)),
    (0, (1.5, 1.5)),
    (0, (6, 2, 1.5, 2)),
    (0, (10, 3)),
    (0, (6, 2, 1.5, 2, 1.5, 2)),
)
MARKERS = ("o", "s", "D", "^", "v", "P")
SIZE = (4.8, 3.1)  # inches at 72 units each: about as wide as a phone, where text keeps its size
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "svg.fonttype": "none",  # text stays text
    "axes.edgecolor": GRID,
    "axes.labelcolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "text.color": INK,
    "text.parse_math": False,  # names of runs and data sets may hold dollar signs
    "legend.frameon": False,
}


def svg(chart: Chart) -> str:
    """The chart as an `<svg>` element: no size of its own, colours from the page's style sheet."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": chart.name}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a browser has the characters a font lacks
        file = io.StringIO()
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure = _draw(chart, is_page=True)
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|style)\b(?:(?!<\1\b).)*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="[\w.]+_\d+"', "", text)  # of every group: a page has many charts
    opening, rest = text.split(">", 1)
    opening = re.sub(r' (?:width|height|version|xmlns:xlink)="[^"]*"', "", opening)
    text = f'{opening} role="img">{rest}'.replace("xlink:href", "href")
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    for color, variable in VARIABLES.items():
        text = text.replace(color, variable)
    return text


def png(chart: Chart, path: Path) -> None:
    """Writes the chart as a PNG file."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # boxes stand for what the font lacks
        figure = _draw(chart, is_page=False)
        with taking_place(path) as file:
            figure.savefig(file, format="png", dpi=160, facecolor="white")


def legend_of(chart: Chart) -> list[Series]:
    """One series of each label, where there is more than one."""
    unique = list({series.label: series for series in chart.series}.values())
    return unique if len(unique) > 1 else []


def _draw(chart: Chart, *, is_page: bool) -> Figure:
    """A panel for each stage, side by side, each with axes of its own.

    A page tells title, unit and legend in text around the picture, where it can wrap.
    """
    figure = Figure(figsize=SIZE if is_page else (5.6, 4.2), layout="constrained")
    panels = figure.subplots(1, len(chart.stages), squeeze=False)[0]
    for axes, stage in zip(panels, chart.stages, strict=True):
        curves = [series for series in chart.series if series.stage == stage]
        for series in curves:
            _draw_series(axes, series)
        for step in chart.marks if stage == "train" else ():
            axes.axvline(step, color=SOFT, linewidth=0.9, alpha=0.5, zorder=0)
        locator = MaxNLocator(nbins=6 // len(panels), integer=True, min_n_ticks=2)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if len({step for s in curves for step in s.steps}) == 1:
            axes.set_xlim(curves[0].steps[0] - 1, curves[0].steps[0] + 1)
        _set_values(axes, chart.scale, curves)
        # Beside another panel there is no room for more than the stage.
        axes.set_xlabel("global step, " * (len(panels) == 1) + STAGES[stage])
    if not is_page:
        panels[0].set_ylabel(chart.unit)
        figure.suptitle(chart.title, fontsize=11)
        entries = legend_of(chart)
        handles = [Line2D([], [], **_look(series)) for series in entries]
        labels = [_label(series.label) for series in entries]
        if entries:
            figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3))
    return figure


def _label(text: str) -> str:
    """Shortens a name to what a font can draw beside the picture."""
    text = " ".join(printable(text).split())
    text = text if len(text) <= 40 else f"{text[:39]}…"
    # One that begins with an underscore would be left out.
    return "\N{ZERO WIDTH SPACE}" * text.startswith("_") + text


def _look(series: Series) -> dict[str, Any]:
    return {
        "color": COLORS[series.color % len(COLORS)],
        "linestyle": DASHES[series.dash % len(DASHES)],
        "linewidth": 1.8,
        "marker": MARKERS[series.dash % len(MARKERS)] if series.is_points else None,
        "markersize": 5,
    }


def _draw_series(axes: Axes, series: Series) -> None:
    look, steps, values = _look(series), series.steps, series.values
    low, high = series.low, series.high
    if series.is_points:
        if low is not None and high is not None:
            # A rounded value may lie a hair outside of its interval.
            errors = np.maximum([values - low, high - values], 0.0)
            axes.errorbar(steps, values, errors, capsize=3, elinewidth=1.2, **look)
        else:
            axes.plot(steps, values, **look)
        return
    if low is not None and high is not None:
        axes.fill_between(steps, low, high, color=look["color"], alpha=0.2, linewidth=0)
    if series.smooth is not None:
        axes.plot(steps, values, color=look["color"], alpha=0.35, linewidth=0.9)
        values = series.smooth
    axes.plot(steps, values, **look)


def _set_values(axes: Axes, scale: str, series: Sequence[Series]) -> None:
    """Sets the limits of the value axis: shares run from 0 to 1, amounts from 0 where asked."""
    if scale == "log":
        axes.set_yscale("log")
        exponents = np.log10([value for s in series for value in (s.values.min(), s.values.max())])
        axes.set_ylim(10 ** np.floor(exponents.min()), 10 ** np.ceil(exponents.max() + 1e-9))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif scale == "rate":
        axes.set_ylim(-0.02, 1.02)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    else:
        if scale == "zero":
            highs = [np.max(s.values if s.high is None else s.high) for s in series]
            axes.set_ylim(0, 1.05 * max(highs) or 1)
        axes.yaxis.set_major_formatter(  # thousands apart; no trailing zeros
            FuncFormatter(lambda x, _: f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.6g}")
        )
