"""Facts and charts to one self-contained page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from jaxrl.extras.report.costs import ATTRIBUTED
from jaxrl.extras.report.curves import MAX_POINTS, Chart, Group, spread
from jaxrl.extras.report.drawing import legend_of, svg
from jaxrl.extras.report.facts import (
    KINDS,
    PARTS,
    STAGES,
    SUITES,
    Facts,
    Row,
    Score,
    held_out,
    segments,
)
from jaxrl.utils.json_io import number_of
from jaxrl.utils.text import printable

MAX_SEGMENT = 3000  # characters shown of one piece of a response


def page(
    groups: Sequence[Group], charts: Sequence[Chart], zero: Sequence[str], plots: str = "plots"
) -> str:
    """The page as HTML, beside a folder `plots` with pictures of its charts."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.ChainableUndefined,  # records of other times lack fields
    )
    templates.filters |= {
        "score": score,
        "interval": interval,
        "change": change,
        "duration": duration,
        "wait": wait,
        "tokens": tokens,
        "seconds": seconds,
        "value": repr,  # a setting as the configuration would have it
        "visible": visible,
        "key_name": key_name,
        "pieces": pieces,
        "image_files": image_files,
    }
    runs = [run for group in groups for run in group.runs]
    html = templates.get_template("page.html").render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        runs=runs,
        max_points=MAX_POINTS,
        groups=groups,
        charts=[(chart, Markup(svg(chart)), legend_of(chart)) for chart in charts],
        zero=zero,
        kinds=KINDS,
        attributed=[*ATTRIBUTED.values()],
        suites=SUITES,
        stages=STAGES,
        part_names=[*PARTS, "other"],
        sentence=sentence,
        all_rows=lambda run: [row for row in run.rows if row.data_set == "all"],
        other_rows=lambda run: [row for row in run.rows if row.data_set != "all"],
        compared=list(dict.fromkeys(name for run in runs for name in held_out(run))),
        held_out=held_out,
        spread_of=spread_of,
        plots=plots,
    )
    return printable(html)  # what came from files may stand anywhere, in a chart's label too


def spread_of(runs: Sequence[Facts], name: tuple[str, str]) -> tuple[str, str, int]:
    """Mean and deviation of a held-out score before and after, and over how many runs.

    These are the finished ones with such a score: the last score of another is of some step on the
    way. `before` is empty where one of them has none.

    Args:
        runs: seeds of one configuration.
        name: measure and suite, as of `held_out`.
    """
    tables = [held_out(run) for run in runs if run.is_finished]
    scores = [table[name] for table in tables if name in table]
    before = [first.value for first, _ in scores if first]
    after = spread([last.value for _, last in scores])
    return spread(before) if len(before) == len(scores) else "", after, len(scores)


def sentence(run: Facts) -> str:
    """Says for a stranger what was trained, on what and how, in one or two sentences."""
    config, start = run.files.config, (run.files.starts or [{}])[-1]
    model = start.get("model", {})
    steps = {stage.stage: stage.num_done for stage in run.stages}
    name = model.get("external") or _ending(config.get("model.path")) or "A model"
    layers, weights = number_of(model.get("layers")), number_of(model.get("parameters"))
    sizes = [f"{layers:.0f} layers"] if layers else []
    sizes += [f"{weights / 1e6:,.1f} million weights"] if weights else []
    name += f" ({', '.join(sizes)})" if sizes else ""
    did = []
    if "sft" in steps:
        did.append(f"a warm start on demonstrations ({steps['sft']:,} steps)")
    if "train" in steps:
        algorithm = str(config.get("advantage.name", "")).upper()
        paid_for: dict[str, float] = config.get("reward.weights") or {}
        parts = [name.replace("_", " ") for name, value in paid_for.items() if value]
        paid = f"; reward: {' and '.join(parts)}" if parts else ""
        did.append(f"reinforcement learning ({algorithm}, {steps['train']:,} steps{paid})")
    text = f"{name} went through {' and then '.join(did)}. " if did else f"{name} was evaluated. "
    if what := searched(config):
        text += f"It answers questions by searching {what}. "
    counts = [row.after.num_questions for row in run.rows if row.data_set == "all"]
    if counts and counts[0]:
        text += f"Scores are of {counts[0]:,} held-out questions."
    return text


def searched(config: Mapping[str, Any]) -> str:
    """Names the source of a run's answers; "" where that is not known.

    Args:
        config: flat.
    """
    engine = str(config.get("search.engine", "local"))
    corpus = _ending(config.get(f"search.{'dense' if engine == 'hybrid' else engine}.corpus"))
    what = {
        "http": "what a server has",
        "web": f"the web by {config.get('search.web.provider')}",
    }.get(engine, corpus)
    topk = config.get(f"search.{engine}.topk")
    return f"{what}, {topk} document{'' if topk == 1 else 's'} a result" if what else ""


def _ending(path: Any) -> str:
    """The last two names of a path."""
    return "/".join(Path(str(path or "")).parts[-2:])


def score(exact_match: Score | None) -> str:
    """A share with three digits."""
    return "–" if exact_match is None else f"{exact_match.value:.3f}"


def interval(exact_match: Score | None) -> str:
    """The 95% interval of a score."""
    if exact_match is None or exact_match.low is None or exact_match.high is None:
        return ""
    return f"{exact_match.low:.3f} to {exact_match.high:.3f}"


def change(row: Row) -> str:
    """Difference of a score, with its sign."""
    return "" if row.before is None else f"{row.after.value - row.before.value:+.3f}"


def duration(seconds: float) -> str:
    """A time, short: 12.3 s, 4 min 05 s, 2 h 10 min; a dash for one that is no number."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def wait(seconds: float) -> str:
    """A short time: 0.3 ms, 12 ms, 1.25 s; a longer one as `duration`."""
    if seconds < 1:
        return f"{1000 * seconds:.2g} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"
    return f"{seconds:.3g} s" if seconds < 60 else duration(seconds)


def tokens(run: Facts) -> str:
    """The tokens that a run has sampled, evaluations included."""
    return f"{run.costs.sampled_tokens:,}" if run.costs else "–"


def seconds(run: Facts) -> str:
    """The time that a run has taken."""
    return duration(sum(stage.total for stage in run.timings)) if run.timings else "–"


def key_name(key: str) -> Markup:
    """A key that may be broken behind its dots."""
    return Markup(".<wbr>").join(visible(key).split("."))


def visible(text: Any) -> str:
    """Printable form of foreign text, cut where it is endless."""
    text = printable(str(text))
    left = len(text) - MAX_SEGMENT
    return f"{text[:MAX_SEGMENT]} … ({left:,} more characters)" if left > 0 else text


def image_files(record: Mapping[str, Any]) -> list[str]:
    """The names of a record's images, those of the workdir relative to it."""
    images = record.get("images")
    listed = images if isinstance(images, list) else []
    return [
        visible(image["file"]) for image in listed if isinstance(image, dict) and "file" in image
    ]


def pieces(record: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """A record's response in pieces: kind, what to call it, text."""
    names = {"information": "found", "forged": "forged result", "text": "untagged"}
    parts = segments(str(record.get("response") or ""))
    return [(part.kind, names.get(part.kind, part.kind), part.text) for part in parts]
